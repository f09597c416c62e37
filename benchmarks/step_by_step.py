"""What a loop adds to a step, told on a machine that is never quiet: single steps in turns.

python benchmarks/step_by_step.py [--layers 2 24] [--steps N] [--out FILE]

Each loop of benchmarks/loops.py takes one step, then the next one does, every other time the other
way round. Whatever disturbs a step makes it longer and never shorter, so that the quickest steps of
each loop are compared (5th percentile of their processor time), with an interval over resampled
blocks of steps. `bare again` is a second bare loop: what it differs by from the first is noise.
Trainer cannot be paused between two steps from outside: host_overhead.py has it.
"""

import argparse
import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: it is read once
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler writes its own log to stderr

import numpy as np
from loops import Accelerated, Bare, Eke, bert, from_memory, from_pipeline, make_job
from numpy.typing import NDArray
from paired import RESAMPLES
from provenance import provenance

from eke.files import write_json
from eke.hardware import usable_cores
from eke.hardware.cpu import cpu_name

WARMUP = 5
"""Steps of each loop before any is timed."""
QUICK = 5.0
"""Percentile of the steps that are compared."""
BLOCK = 10
"""Steps that are resampled together: a disturbance lasts longer than one."""
PAIRS = (
    ("bare again", "bare"),
    ("bare_data", "bare"),
    ("eke", "bare"),
    ("eke", "bare_data"),
    ("accelerate", "bare"),
    ("eke", "accelerate"),
)
"""Which loop is compared with which."""

Steps = NDArray[np.float64]
"""Milliseconds of each step, in turns."""


def measure(num_layers: int, num_steps: int, folder: Path) -> dict[str, Steps]:
    """Single steps of each loop, in turns."""
    job = make_job(folder, *bert(num_layers, num_steps + 2 * WARMUP))
    loops: dict[str, Any] = {
        "bare": Bare(job, from_memory(job)),
        "bare_data": Bare(job, from_pipeline(job)),
        "eke": Eke(job),
        "accelerate": Accelerated(job),
        "bare again": Bare(job, from_memory(job)),
    }
    for loop in loops.values():
        loop.advance(WARMUP)
    found: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    gc.disable()  # else it falls into some loop's step
    for number in range(num_steps):
        for name in names if number % 2 else names[::-1]:
            start = time.process_time()
            loops[name].advance(1)
            found[name].append((time.process_time() - start) * 1e3)
        if number % BLOCK == 0:
            gc.collect()
    gc.enable()
    return {name: np.asarray(times) for name, times in found.items()}


def longer(one: Steps, other: Steps) -> tuple[float, float, float]:
    """By how many milliseconds the quick steps of one are longer, and the 95 % interval of that."""
    draw = np.random.default_rng(0)
    blocks = len(one) // BLOCK
    pairs = np.stack([one, other])[:, : blocks * BLOCK].reshape(2, blocks, BLOCK)
    drawn = pairs[:, draw.integers(blocks, size=(RESAMPLES, blocks))].reshape(2, RESAMPLES, -1)
    quick = np.percentile(drawn, QUICK, axis=2)
    low, high = np.percentile(quick[0] - quick[1], [2.5, 97.5])
    difference = np.percentile(one, QUICK) - np.percentile(other, QUICK)
    return float(difference), float(low), float(high)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 24])
    parser.add_argument("--steps", type=int, default=400, help="of each loop")
    parser.add_argument("--out", type=Path, default=Path("results/step_by_step_cpu.json"))
    asked = parser.parse_args()
    if asked.steps < 10 * BLOCK:
        parser.error(f"--steps must be {10 * BLOCK} or more")
    load = os.getloadavg()[0]
    cases = []
    for num_layers in asked.layers:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(num_layers, asked.steps, Path(folder))
        quick = {name: float(np.percentile(times, QUICK)) for name, times in found.items()}
        rows = [(one, other, *longer(found[one], found[other])) for one, other in PAIRS]
        cases.append({
            "layers": num_layers,
            "steps": asked.steps,
            "quick_step_ms": quick,
            "longer": [dict(zip(("loop", "than", "ms", "low", "high"), row, strict=True))
                       for row in rows],
        })  # fmt: skip
        print(f"\n{num_layers} layers; processor ms of the quickest {QUICK:.0f} % of steps")
        for one, other, by, low, high in rows:
            print(f"  {one:11} {quick[one]:8.3f}  longer than {other:11}{by:8.3f} "
                  f"[{low:.3f} {high:.3f}]")  # fmt: skip
    record = {
        "benchmark": "step_by_step",
        "device": cpu_name(),
        "cores": usable_cores(),
        "environment": provenance(),
        "load": load,
        "cases": cases,
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(asked.out, record)


if __name__ == "__main__":
    main()
