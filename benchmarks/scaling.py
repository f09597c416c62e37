"""Cost against size: eke's loop over model and batch, and its pool over the number of runs.

python benchmarks/scaling.py [--size cpu|gpu] [--rounds N] [--pool-rounds N] [--out FILE]

- The loop of eke beside one written by hand, in turns, by depth, width and batch
  (benchmarks/scaling_loops.py). A ratio is eke's steps per second over the other's, round by round.
- The pool of eke beside a loop of the same processes, which train nothing, for 10 to 300 runs:
  seconds per run, and what the pool adds to each (benchmarks/launching.py).

About five minutes on two cores with `--size cpu`. `--size gpu` wants a GPU, and has no pool in it.
The record is written after each case.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler writes its own log to stderr

from arguments import at_least, writable
from launching import bare, planned, pool, seconds, use_stand_in
from paired import summarize
from provenance import provenance

from eke.common.files import write_json
from eke.config.compose import compose
from eke.hardware import detect

RUNS = (10, 30, 100, 300)
"""Of a sweep."""

Row = dict[str, Any]


def pool_turns(root: Path, runs: int, first: bool) -> dict[str, float]:
    """Seconds per run of one turn each; `first`: the bare loop begins."""
    began = time.perf_counter()
    cells, jobs = planned(root / "eke", runs)
    took = {"planning": (time.perf_counter() - began) / runs}
    turns: dict[str, Callable[[], None]] = {
        "bare": lambda: bare(root / "bare", runs),
        "eke": lambda: pool(root / "eke", cells, jobs),
    }
    for name in sorted(turns, reverse=not first):
        took[name] = seconds(turns[name]) / runs
    return took


def compare_pools(root: Path, sizes: Sequence[int], num_rounds: int) -> list[Row]:
    """For each number of runs: seconds per run, and what the pool adds, round by round."""
    found: dict[int, list[dict[str, float]]] = {runs: [] for runs in sizes}
    for number in range(num_rounds):
        for runs in sizes:
            here = root / f"{number}-{runs}"
            found[runs].append(pool_turns(here, runs, first=number % 2 == 0))
            shutil.rmtree(here)
            print(f"round {number}, {runs} runs: {found[runs][-1]}", file=sys.stderr)
    return [
        {
            "runs": runs,
            "s_per_run": {
                name: summarize([turn[name] for turn in turns]).as_dict() for name in turns[0]
            },
            "added_s_per_run": summarize([t["eke"] - t["bare"] for t in turns]).as_dict(),
        }
        for runs, turns in found.items()
    ]


def measure_pools(sizes: Sequence[int], num_rounds: int) -> list[Row]:
    """The same with runs that train nothing, in folders of their own."""
    compose(["hardware=cpu"])  # imports, and Hydra's search for plugins
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EKE_LEASES"] = f"{folder}/leases"
        use_stand_in(Path(folder))
        return compare_pools(Path(folder), sizes, num_rounds)


def print_pools(rows: Sequence[Row]) -> None:
    """A line for each number of runs."""
    if not rows:
        return
    print(f"\n{'runs':>6}{'bare, ms':>11}{'pool, ms':>11}{'added [p10 p90], ms':>25}", end="")
    print(f"{'planning, ms':>14}")
    for row in rows:
        medians = {name: 1e3 * each["median"] for name, each in row["s_per_run"].items()}
        added = {name: 1e3 * row["added_s_per_run"][name] for name in ("median", "p10", "p90")}
        spread = f"{added['median']:.1f} [{added['p10']:.1f} {added['p90']:.1f}]"
        print(f"{row['runs']:6d}{medians['bare']:11.1f}{medians['eke']:11.1f}{spread:>25}", end="")
        print(f"{medians['planning']:14.1f}")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--steps", type=int, default=10, help="per turn, a multiple of 10")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each loop, at least 2")
    parser.add_argument("--runs", type=at_least(1), nargs="+", default=RUNS, help="of each sweep")
    parser.add_argument("--pool-rounds", type=int, default=3, help="at least 2")
    parser.add_argument("--budget", type=float, default=450, help="seconds; no case begins later")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    device = detect()
    if asked.size == "gpu" and device.kind != "cuda":
        parser.error("no CUDA device here; --size cpu is for one without")
    if min(asked.rounds, asked.pool_rounds) < 2 or asked.steps < 10 or asked.steps % 10:
        parser.error("--rounds and --pool-rounds must be at least 2, --steps a multiple of 10")
    record: Row = {
        "benchmark": "scaling",
        "size": asked.size,
        "hardware": {
            "device": device.name,
            "cores": os.cpu_count(),
            "load_average_1m_at_start": os.getloadavg()[0],
        },
        "environment": provenance(),
    }
    out = writable(parser, asked.out or Path(f"results/scaling_{asked.size}.json"))
    if asked.size == "cpu":  # the pool is the same whatever it would start
        record["pool"] = measure_pools(asked.runs, asked.pool_rounds)
        write_json(out, record)
    import torch  # a dispatcher has none of it
    from scaling_loops import compare_loops, print_loops

    torch.set_num_interop_threads(1)
    for found in compare_loops(asked.size, asked.steps, asked.rounds, asked.budget):
        record |= found
        record["hardware"]["load_average_1m_at_end"] = os.getloadavg()[0]
        write_json(out, record)
    print_loops(record.get("loops", []))
    print_pools(record.get("pool", []))
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    main()
