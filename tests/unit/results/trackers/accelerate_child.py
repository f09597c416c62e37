"""An attempt in small: `python accelerate_child.py OPTION FOLDER ATTEMPT EXIT_CODE STEP...`.

A step below zero stands for an evaluation at that step.
"""

import logging
import sys
from contextlib import suppress
from pathlib import Path

from accelerate import Accelerator

from eke.common.paths import RunPaths
from eke.config import schema
from eke.plan.record import metrics
from eke.results.trackers import TrackedRun, build_tracker
from eke.results.trackers.tracker import Row


def make_row(step: int, attempt: int) -> Row:
    row = {"train/global_step": abs(step), "attempt": attempt}
    return {**row, **({"eval/loss": 0.25} if step < 0 else {"train/loss": 1 / step})}


def main(option: str, folder: str, attempt: str, exit_code: str, *steps: str) -> None:
    logging.basicConfig(level=logging.INFO)  # as the worker does
    run = TrackedRun(
        run_id="0123456789abcdef",
        name="precision=bf16",
        tags=("cpu",),
        notes="python train.py precision=bf16",
        factors={"precision": "bf16"},
        config={"optimizer": {"lr": 1e-3}, "seed": 7, "path": None, "list": [1, 2]},
        directory=Path(folder),
        attempt=int(attempt),
        settings=schema.Tracker(option=option, group="sweep-1"),
    )
    tracker = build_tracker(run)
    Accelerator(cpu=True)
    for step in steps:
        row = make_row(int(step), int(attempt))
        with suppress(OSError):  # the test of a full disk is about the tracker
            metrics.append_rows(RunPaths(run.directory).metrics, [row])
        tracker.log([row])
    tracker.summary({"outcome": "ok", "tokens_per_s": 12.5})
    tracker.finish(int(exit_code))
    print(f"problem: {tracker.problem}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
