"""What a training loop costs on the host, beside the kernels: eke, a bare one and Hugging Face's.

python benchmarks/host_overhead.py [--layers N ...] [--steps N] [--rounds N] [--out FILE]

One process, one thread, the loops of benchmarks/loops.py in turns. Prints a table and writes a JSON
record. What the numbers mean, and what they were: docs/lab.md.
"""

import argparse
import gc
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: it is read once
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler writes its own log to stderr

import torch
from loops import (
    LOG_EVERY,
    Accelerated,
    Bare,
    Eke,
    bert,
    from_memory,
    from_pipeline,
    make_job,
    run_trainer,
)
from paired import Start, Turn, Turns, difference, play_round, ratio, summarize
from provenance import provenance
from torch.utils._python_dispatch import TorchDispatchMode

from eke.files import write_json
from eke.hardware.cpu import cpu_name

LAYERS = (2, 24)
"""So small that only the host counts; and many tensors, for what grows with their number."""
WARMUP = 2
"""Steps at the start of a turn that are not timed."""
ROWS = (
    ("bare", "bare"),
    ("bare_data", "bare"),
    ("eke", "bare"),
    ("eke", "bare_data"),
    ("trainer", "bare"),
    ("trainer", "eke"),
    ("accelerate", "bare"),
    ("accelerate", "eke"),
)
"""Which loop is compared with which; docs/claims names rows by their number."""
TARGET_MS = 0.5
"""What eke may take longer per step than the bare loop on batches prepared the same way."""


class Loop(Protocol):
    """A loop that trains as many steps as it is told to."""

    def advance(self, num_steps: int) -> None:
        """Train."""

    def last_loss(self) -> float:
        """Of the last step."""


class Operations(TorchDispatchMode):
    """Counts PyTorch operations: the same on every machine, however noisy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one, and run it."""
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def per_step(self, num_steps: int) -> dict[str, float]:
        """All of them, and those that read a value: on a GPU the host would wait there."""
        reads = self.counts["_local_scalar_dense"]
        return {"all": self.counts.total() / num_steps, "reads": reads / num_steps}


class TrainerTurns:
    """Lets the other loops take their turns from inside Trainer's, which nobody else can pause.

    A round: Trainer warms up and is timed; then the others, in an order that rotates, so that each
    comes after each. After the last round the operations of some more steps are counted.
    """

    def __init__(
        self, turns: Turns, others: Sequence[Turn], num_steps: int, num_rounds: int
    ) -> None:
        self.turns, self.others = turns, list(others)
        self.num_steps, self.num_rounds = num_steps, num_rounds
        self.operations = Operations()
        self.start = Start.now()

    @property
    def last_step(self) -> int:
        """Steps that Trainer is to train."""
        return self.num_rounds * (WARMUP + self.num_steps) + LOG_EVERY

    def on_step_end(self, done: int) -> None:
        """Trainer has done this many steps."""
        num_rounds, at = divmod(done, WARMUP + self.num_steps)
        if at == 0:
            self.start.end(self.turns, self.num_steps)
            play_round(self.others, self.num_steps, WARMUP)
            self.others.append(self.others.pop(0))
            if num_rounds == self.num_rounds:
                self.operations.__enter__()  # type: ignore[no-untyped-call]  # torch 2.13
        if at == WARMUP:
            self.start = Start.now()
        if done == self.last_step:
            self.operations.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch 2.13


def compare(num_layers: int, num_steps: int, num_rounds: int) -> dict[str, Any]:
    """All loops in turns, for one depth of the model."""
    with tempfile.TemporaryDirectory() as folder:
        job_steps = (num_rounds + 2) * (WARMUP + num_steps)
        job = make_job(Path(folder), *bert(num_layers, job_steps))
        bare, bare_data, eke = Bare(job, from_memory(job)), Bare(job, from_pipeline(job)), Eke(job)
        accelerated = Accelerated(job)
        check_same_work(bare_data, eke, accelerated)
        loops = {
            "bare": bare.advance,
            "bare_data": bare_data.advance,
            "eke": eke.advance,
            "accelerate": accelerated.advance,
        }
        operations = {
            "bare": count_operations(bare_data),
            "eke": count_operations(eke),
            "accelerate": count(accelerated.advance),
        }
        turns = {name: Turns() for name in (*loops, "trainer")}
        others = [(advance, turns[name]) for name, advance in loops.items()]
        clock = TrainerTurns(turns["trainer"], others, num_steps, num_rounds)
        gc.collect()
        run_trainer(job, clock.last_step, clock.on_step_end)
        operations["trainer"] = clock.operations.per_step(LOG_EVERY)
    return {
        "layers": num_layers,
        "tensors": len(job.parameters),
        "parameters": sum(p.numel() for p in job.parameters),
        "steps_per_turn": num_steps,
        "operations_per_step": operations,
        "wall": rows_of(turns, "wall"),
        "cpu": rows_of(turns, "cpu"),
    }


def check_same_work(reference: Loop, *others: Loop, within: float = 1e-5) -> None:
    """Loops from the same weights, batches and dropout must reach the same loss.

    Weights are not compared: those without a gradient but for rounding (BERT's key biases) move by
    the learning rate in Adam, in a direction that is chance.

    Args:
        reference: the loop whose loss is expected.
        others: loops that must come to the same.
        within: how far off they may be, relative to the reference's.

    Raises:
        SystemExit: they do not, so that comparing their times would mean nothing.
    """
    losses = []
    for loop in (reference, *others):
        torch.manual_seed(0)
        loop.advance(LOG_EVERY)
        losses.append(loop.last_loss())
    expected = losses[0]
    if not all(abs(loss - expected) <= within * abs(expected) for loss in losses):
        names = ", ".join(type(loop).__name__ for loop in (reference, *others))
        raise SystemExit(f"the loops computed different losses ({names}): {losses}")


def count_operations(loop: Bare | Eke) -> dict[str, float]:
    """PyTorch operations per step, metrics included; batches are prepared before."""
    batches = loop.batches
    loop.batches = iter(list(itertools.islice(batches, LOG_EVERY)))
    found = count(loop.advance)
    loop.batches = batches
    return found


def count(advance: Callable[[int], None]) -> dict[str, float]:
    """PyTorch operations per step, whatever the loop does in one."""
    operations = Operations()
    with operations:
        advance(LOG_EVERY)
    return operations.per_step(LOG_EVERY)


def rows_of(turns: dict[str, Turns], clock: str) -> list[dict[str, Any]]:
    """The comparisons of one clock."""
    return [
        {
            "loop": name,
            "against": reference,
            "ms_per_step": summarize(turns[name].of(clock)).as_dict(),
            "longer_ms": difference(turns[name], turns[reference], clock).as_dict(),
            "ratio": ratio(turns[name], turns[reference], clock).as_dict(),
        }
        for name, reference in ROWS
    ]


def print_case(case: dict[str, Any]) -> None:
    """One depth of the model as a table."""
    print(
        f"\nBERT, {case['layers']} layers, {case['tensors']} tensors, "
        f"{case['wall'][0]['ms_per_step']['n']} rounds of {case['steps_per_turn']} steps; "
        "milliseconds per step, median [p10 p90], 95 % interval of the median difference"
    )
    for clock in ("wall", "cpu"):
        print(f"\n  {clock:<12}{'ms':>8}{'[p10':>9}{'p90]':>9}   {'longer than':<12}", end="")
        print(f"{'by ms':>8}{'interval':>18}{'ratio':>8}")
        for row in case[clock]:
            mine, longer = row["ms_per_step"], row["longer_ms"]
            print(
                f"  {row['loop']:<12}{mine['median']:8.3f}{mine['p10']:9.3f}{mine['p90']:9.3f}   "
                f"{row['against']:<12}{longer['median']:8.3f}"
                f"{longer['low']:9.3f}{longer['high']:9.3f}{row['ratio']['median']:8.3f}"
            )
    print(
        "\n  PyTorch operations per step, and reads of a tensor's value (a GPU's host waits there);"
    )
    print("  Accelerate's and Trainer's include the collation of their batch")
    for name, counts in case["operations_per_step"].items():
        print(f"  {name:<12}{counts['all']:8.1f}{counts['reads']:9.1f}")


def meets_target(case: dict[str, Any], clock: str) -> bool:
    """Whether eke is within the target, and below Trainer although Trainer's samples are ready."""
    longer = {(row["loop"], row["against"]): row["longer_ms"] for row in case[clock]}
    loop, trainer = longer["eke", "bare_data"], longer["trainer", "eke"]
    return bool(loop["median"] <= TARGET_MS and trainer["median"] > 0)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, help="of each BERT")
    parser.add_argument("--steps", type=int, default=40, help="steps per turn, a multiple of 10")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each loop, at least 2")
    parser.add_argument("--out", type=Path, default=Path("results/host_overhead_cpu.json"))
    asked = parser.parse_args()
    if asked.steps < LOG_EVERY or asked.steps % LOG_EVERY or asked.rounds < 2:
        parser.error(f"--steps must be a multiple of {LOG_EVERY}, --rounds at least 2")
    torch.set_num_interop_threads(1)
    cases = [compare(num_layers, asked.steps, asked.rounds) for num_layers in asked.layers]
    for case in cases:
        case["meets_target"] = {clock: meets_target(case, clock) for clock in ("wall", "cpu")}
        print_case(case)
    record = {
        "benchmark": "host_overhead",
        "hardware": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_average_1m_at_end": os.getloadavg()[0],
        },
        "environment": provenance(),
        "target_ms": TARGET_MS,
        "workload": "BERT 64 wide, 4 sequences of 32 tokens, fp32, fused AdamW, clipping at 1.0",
        "cases": cases,
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(asked.out, record)
    print(f"\nwritten to {asked.out}")


if __name__ == "__main__":
    main()
