"""How near `eke fit` comes to the exhaustive best, and with how many trials.

    python benchmarks/fitting.py simulated            # made-up machines: no run is started
    python benchmarks/fitting.py real                 # every configuration of a small space, here

`simulated` searches random machines of two makes, whose generators
(tests/unit/tuning/search/surfaces.py and surfaces_of_parts.py) share no code with the time model,
with estimates of two qualities and without. `real` searches from a good start and from a poor one,
then runs the whole space three times, and asks how good a search's choice was there: what was
typed, where nothing was better by more than chance. --output FILE keeps what was found as JSON.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests"))

from arguments import at_least, writable  # noqa: E402  # after the path is there
from provenance import machine, provenance  # noqa: E402
from unit.tuning.search.surfaces import OFF, Surface, make, search  # noqa: E402
from unit.tuning.search.surfaces_of_parts import make_of_parts  # noqa: E402

from eke.common.files import write_json  # noqa: E402
from eke.plan.record import EXIT_FAILED, EXIT_OK  # noqa: E402
from eke.tuning.search.search import SHORT  # noqa: E402

KINDS = {
    "techniques multiply; estimates off by 12 % a technique": (make, True, 1.0),
    "techniques multiply; estimates off by 24 % a technique": (make, True, 2.0),
    "techniques multiply; no estimates": (make, False, 1.0),
    "a step of parts; estimates off by 25 % a part": (make_of_parts, True, 1.0),
    "a step of parts; estimates off by 50 % a part": (make_of_parts, True, 2.0),
    "a step of parts; no estimates": (make_of_parts, False, 1.0),
}
BUDGETS = (4, 8, 16)

TYPED = (
    "model=tiny", "data.seq_len=64", "compile=none", "memory=none", "distributed=none",
    "tracker=none",
)  # fmt: skip
SPACE = {
    "attention": ("sdpa", "eager"),
    "kernels": ("none", "fused_linear_cross_entropy"),
    "batch.per_device": ("1", "2", "4", "8"),
}
"""What is not typed, and every micro-batch of eight samples per step."""

STARTS = (("batch.per_device=8",), ("batch.per_device=1", "batch.accumulation=8"))
"""What is typed beside that: all samples of a step at once, and one by one."""

REPEATS = 3
"""Of each configuration, in turns: the quickest of them counts, since others use the machine."""

Times = dict[tuple[str, ...], float]
"""Configuration -> seconds per step."""


def simulated(count: int) -> list[dict[str, Any]]:
    """One row for each kind of estimate and budget."""
    rows = []
    for kind, (generator, estimated, error) in KINDS.items():
        surfaces = [generator(seed, estimated, error) for seed in range(10_000, 10_000 + count)]
        for budget in BUDGETS:
            found = [search(each, seed, budget) for seed, each in enumerate(surfaces)]
            off = sorted(each.off - 1 for each in found)
            rows.append({
                "machines": kind,
                "budget": budget,
                "searches": count,
                "estimates_off": estimates_off(surfaces) if estimated else None,
                "within_5_percent": sum(each.off <= OFF for each in found) / count,
                "median_off": statistics.median(off),
                "p90_off": off[int(0.9 * count)],
                "mean_trials": statistics.fmean(each.num_trials for each in found),
                "searches_with_out_of_memory": sum(each.num_out_of_memory > 0 for each in found),
                "most_out_of_memory": max(each.num_out_of_memory for each in found),
            })  # fmt: skip
            print(json.dumps(rows[-1]))
    return rows


def estimates_off(surfaces: Sequence[Surface]) -> float:
    """Standard deviation of the logarithm of what estimates are off by, all points alike aside."""
    return statistics.fmean(
        statistics.pstdev(
            math.log(step_s / point.expected_s)
            for point, step_s in zip(each.points, each.step_s, strict=True)
            if point.expected_s
        )
        for each in surfaces
    )


def real(budget: int) -> list[dict[str, Any]]:
    """A search from each start, then their whole space; one row for each search."""
    with tempfile.TemporaryDirectory() as folder:
        found = [search_from(start, Path(folder) / f"from{n}", budget)
                 for n, start in enumerate(STARTS)]  # fmt: skip
        cells = [f"{key}={','.join(values)}" for key, values in SPACE.items()]
        space = (*TYPED, *cells, "batch.target=8", *SHORT, f"sweep.repeats={REPEATS}")
        whole = Path(folder) / "whole"
        whole.mkdir()
        # A run that fails is one configuration less; the times of the others count.
        run(whole, str(REPO / "train.py"), "-m", *space, fine=(EXIT_OK, EXIT_FAILED))
        measured = step_times(whole)
    rows = []
    for start, (fit, seconds) in zip(STARTS, found, strict=True):
        resolved = fit["option"] is not None
        choice = fit["best"] if resolved else start  # nothing is written: what was typed stays
        row = {
            "typed": " ".join(start),
            "trials": len(fit["trials"]),
            "seconds": seconds,
            "resolved": resolved,
        }
        rows.append({**row, **rank(choice, start, measured)})
    return rows


def search_from(start: Sequence[str], folder: Path, budget: int) -> tuple[dict[str, Any], float]:
    """What a search that starts there leaves in fit.json, and its seconds from the command on."""
    options = folder / "options"
    options.mkdir(parents=True)
    flags = ("--config-dir", str(options), "--budget-trials", str(budget))
    before = time.perf_counter()
    run(folder, "-m", "eke", "fit", *flags, *TYPED, *start)
    seconds = time.perf_counter() - before
    return json.loads(next(folder.glob("runs/sweep-*/fit.json")).read_text()), seconds


def rank(choice: Sequence[str], start: Sequence[str], measured: Times) -> dict[str, Any]:
    """How good a choice is among all that was measured; None where it is not one of them."""
    chosen, typed = (key_of(dict(text.split("=", 1) for text in each)) for each in (choice, start))
    order, found = sorted(measured.values()), measured.get(chosen)
    before = measured.get(typed)
    if found is None:
        print(f"not among what was measured: {' '.join(chosen)}", file=sys.stderr)
    return {
        "configurations": len(measured),
        "chosen": " ".join(chosen),
        "off_exhaustive_best": found and found / order[0] - 1,
        "rank": found and order.index(found) + 1,
        "typed_off": before and before / order[0] - 1,
        "median_off": statistics.median(order) / order[0] - 1 if order else None,
    }


def step_times(folder: Path) -> Times:
    """Configuration -> seconds per step, the quicker of its repeats: others use the machine."""
    times = defaultdict(list)
    (sweep,) = folder.glob("runs/sweep-*")
    for cell in json.loads((sweep / "sweep.json").read_text())["cells"]:
        if not cell["folder"]:  # refused here: a package, or a version, is missing
            continue
        record = json.loads((folder / cell["folder"] / "record.json").read_text())
        if record["outcome"] != "ok":
            continue
        typed = dict(text.split("=", 1) for text in cell["overrides"])
        times[key_of(typed)].append(record["timing"]["steady_step_s"]["median"])
    return {key: min(values) for key, values in times.items()}


def key_of(typed: dict[str, str]) -> tuple[str, ...]:
    """A configuration's values in the space, with the defaults of what is not typed."""
    usual = {"attention": "sdpa", "kernels": "none", "batch.per_device": "8"}
    return tuple(f"{key}={typed.get(key, usual[key])}" for key in SPACE)


def run(folder: Path, *arguments: str, fine: tuple[int, ...] = (EXIT_OK,)) -> None:
    """A Python program in a folder; its output is this one's.

    Raises:
        CalledProcessError: it ends with another code than those that are fine.
    """
    path = os.pathsep.join([str(REPO / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    if done.returncode not in fine:
        done.check_returncode()


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["simulated", "real"])
    parser.add_argument("--count", type=at_least(1), default=200, help="made-up machines")
    parser.add_argument("--budget", type=at_least(2), default=8, help="trials of the real search")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.output:
        writable(parser, options.output)
    rows = simulated(options.count) if options.what == "simulated" else real(options.budget)
    if options.what == "real":
        print(json.dumps(rows, indent=1))
    if options.output:
        content = {
            "what": f"eke fit beside the exhaustive best: {options.what}",
            "machine": machine(),
            "environment": provenance(),
            "rows": rows,
        }
        write_json(options.output, content)


if __name__ == "__main__":
    main()
