"""What a training loop costs beside the kernels: eke, loops written by hand, and libraries'.

python benchmarks/host_overhead.py [--cases 2x64x4 ...] [--steps N] [--out FILE]

One process, one thread. Each loop of benchmarks/loops.py takes a step to find its way back into the
caches and two that are timed, then the next one does, every other time the other way round.
Whatever disturbs a step makes it longer and never shorter, so that quick steps of each loop are
compared (10th percentile of their processor time, taken for steps that write and those that do not
on their own), with an interval over resampled blocks of steps. `bare again` is a second bare loop:
what it differs by from the first is noise.

A case is LAYERSxWIDTHxBATCH of a BERT. Prints tables, writes a record; what the numbers were:
notes/lab/loop.md. Some eight minutes on a quiet machine.
"""

import argparse
import gc
import os
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: it is read once
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler writes its own log to stderr

import numpy as np
import torch
from arguments import writable
from library_loops import Accelerated, StockTrainer, from_loader
from loops import (
    BERT_WORKLOAD,
    LOG_EVERY,
    Bare,
    Eke,
    Loop,
    bert,
    check_same_work,
    from_memory,
    from_pipeline,
    make_job,
)
from numpy.typing import NDArray
from operations import count_work
from paired import RESAMPLES
from provenance import provenance

from eke.common.files import write_json
from eke.hardware import usable_cores
from eke.hardware.cpu import cpu_name
from eke.training.loop.training_state import TrainingState

TIMED = 2
"""Steps of a turn that are timed, after one that is not."""
BLOCK = TIMED * LOG_EVERY
"""Timed steps until they begin again at the same place between two writes: 3 and 10 are coprime."""
QUICK = 10.0
"""Percentile of the steps that is compared: what one takes when nothing disturbs it."""
PAIRS = (
    ("bare again", "bare"),
    ("bare_data", "bare"),
    ("hand", "bare"),
    ("eke", "bare"),
    ("eke", "bare_data"),
    ("eke", "hand"),
    ("accelerate", "hand"),
    ("accelerate", "eke"),
    ("trainer", "hand"),
    ("trainer", "eke"),
)
"""Which loop is compared with which; notes/claims names rows by their number."""

Steps = NDArray[np.float64]
"""Milliseconds of a loop's timed steps, shape (blocks, BLOCK)."""


@dataclass(frozen=True)
class Case:
    """One BERT and its batch."""

    layers: int
    width: int
    batch: int

    @staticmethod
    def parse(text: str) -> "Case":
        """Of LAYERSxWIDTHxBATCH."""
        numbers = [int(part) for part in text.split("x") if part.isdecimal()]
        if len(numbers) != 3 or text.count("x") != 2 or not all(numbers) or numbers[1] % 16:
            why = f"{text!r} is not LAYERSxWIDTHxBATCH with a multiple of 16 as width: 2x64x4"
            raise argparse.ArgumentTypeError(why)
        return Case(*numbers)


DEFAULT_STEPS = 400
CASES = {Case(2, 16, 1): 600, Case(2, 64, 4): 600, Case(24, 16, 1): 600, Case(4, 256, 16): 200}
"""So small that only the host counts; a little larger; many tensors, for what grows with their
number; large steps. Each with the steps that are timed."""


def make_loops(job: TrainingState) -> dict[str, Loop]:
    """All but Trainer, none of which has trained."""
    return {
        "bare": Bare(job, from_memory(job)),
        "bare_data": Bare(job, from_pipeline(job)),
        "hand": Bare(job, from_loader(job)),
        "eke": Eke(job),
        "accelerate": Accelerated(job),
        "bare again": Bare(job, from_memory(job)),
    }


def measure(case: Case, num_steps: int) -> dict[str, Any]:
    """All loops, in turns."""
    total = 2 * num_steps + 4 * LOG_EVERY  # what is checked and counted first
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        job = make_job(folder, *bert(case.layers, total, case.width, case.batch))
        trainer = StockTrainer(job, total)
        loops = {**make_loops(job), "trainer": trainer}
        stack.enter_context(closing(trainer))
        check_same_work(*loops.values())
        work = {
            name: count_work(loop)
            for name, loop in loops.items()
            if name not in ("trainer", "bare again")  # in a thread of its own; counted already
        }
        found = take_turns(loops, num_steps)
    return {
        "layers": case.layers,
        "width": case.width,
        "batch": case.batch,
        "tensors": len(job.parameters),
        "parameters": sum(p.numel() for p in job.parameters),
        "steps": num_steps,
        "quick_step_ms": {name: float(quick(steps)) for name, steps in found.items()},
        "pairs": [compare(found, *pair) for pair in PAIRS],
        "per_step": work,
    }


def take_turns(loops: dict[str, Loop], num_steps: int) -> dict[str, Steps]:
    """Time as many steps of each loop."""
    found: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    gc.disable()  # else it falls into some loop's step
    for number in range(num_steps // TIMED):
        if number % LOG_EVERY == 0:
            gc.collect()
        for name in names if number % 2 else names[::-1]:
            loops[name].advance(1)
            for _ in range(TIMED):
                start = time.process_time()
                loops[name].advance(1)
                found[name].append((time.process_time() - start) * 1e3)
    gc.enable()
    return {name: np.asarray(times).reshape(-1, BLOCK) for name, times in found.items()}


def quick(steps: Steps, axis: int = 0) -> Any:
    """What a step takes undisturbed, writes included: the mean over the places in a block."""
    return np.percentile(steps, QUICK, axis=axis).mean(axis=-1)


def compare(found: dict[str, Steps], name: str, other: str) -> dict[str, Any]:
    """By how much quick steps of one are longer, and how many times as long; 95 % intervals."""
    draw = np.random.default_rng(0)
    count = len(found[name])
    drawn = draw.integers(count, size=(RESAMPLES, count))
    mine, others = (quick(found[each][drawn], axis=1) for each in (name, other))
    whole, reference = quick(found[name]), quick(found[other])
    return {
        "loop": name,
        "than": other,
        "longer_ms": interval(whole - reference, mine - others),
        "times": interval(whole / reference, mine / others),
    }


def interval(value: float, drawn: Steps) -> dict[str, float]:
    """A value and the interval that 95 % of those drawn are in."""
    low, high = np.percentile(drawn, [2.5, 97.5])
    return {"value": float(value), "low": float(low), "high": float(high)}


def print_case(case: dict[str, Any]) -> None:
    """One case as a table."""
    print(
        f"\nBERT, {case['layers']} layers, {case['width']} wide, batch {case['batch']}, "
        f"{case['steps']} steps each; processor milliseconds of a quick step [95 % interval]"
    )
    for row in case["pairs"]:
        by, times = row["longer_ms"], row["times"]
        print(
            f"  {row['loop']:11}{case['quick_step_ms'][row['loop']]:9.3f}  longer than "
            f"{row['than']:10} by {by['value']:7.3f} [{by['low']:.3f} {by['high']:.3f}], "
            f"{times['value']:.3f} times [{times['low']:.3f} {times['high']:.3f}]"
        )
    print("  per step, batch and writes included:")
    for name, counts in case["per_step"].items():
        print(
            f"  {name:11}{counts['operations']:9.1f} operations of PyTorch, {counts['reads']:.1f} "
            f"reads of a tensor's value, {counts['calls']:.0f} calls in Python"
        )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=Case.parse, nargs="+", default=list(CASES),
                        metavar="LAYERSxWIDTHxBATCH")  # fmt: skip
    parser.add_argument("--steps", type=int, help="of each loop; else as many as the case takes")
    parser.add_argument("--out", type=Path, default=Path("results/host_overhead_cpu.json"))
    asked = parser.parse_args()
    if asked.steps is not None and (asked.steps < 5 * BLOCK or asked.steps % BLOCK):
        parser.error(f"--steps must be a multiple of {BLOCK}, {5 * BLOCK} or more")
    writable(parser, asked.out)
    torch.set_num_interop_threads(1)
    record: dict[str, Any] = {
        "benchmark": "host_overhead",
        "device": cpu_name(),
        "cores": usable_cores(),
        "environment": provenance(),
        "load": os.getloadavg()[0],
        "workload": BERT_WORKLOAD,
        "cases": [],
    }
    for case in asked.cases:
        record["cases"].append(measure(case, asked.steps or CASES.get(case, DEFAULT_STEPS)))
        print_case(record["cases"][-1])
        write_json(asked.out, record)
    print(f"\nwritten to {asked.out}")


if __name__ == "__main__":
    main()
