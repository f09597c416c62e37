"""A training process in small: `python child.py FOLDER [MODE FINISH_S]`.

Each line on stdin is a number of rows to log, answered with `logged` once `log` returned; the end
of input finishes the run.
"""

import logging
import os
import sys
from pathlib import Path

from eke.config import schema
from eke.results.trackers import TrackedRun, Tracker, build_tracker
from eke.results.trackers.async_tracker import AsyncTracker
from eke.results.trackers.wandb import WandbRun


def make_run(mode: str) -> TrackedRun:
    return TrackedRun(
        run_id="0123456789abcdef",
        name="optimizer=adafactor",
        tags=("cpu", "t" * 80),
        notes="python train.py optimizer=adafactor",
        factors={"optim": "adafactor", "deepspeed": "zero2", "seed": "seven", "a.b": "c"},
        config={"optim": {"lr": 1e-3}, "deepspeed": {"stage": 2}, "seed": 7, "path": None},
        directory=Path(sys.argv[1]),
        attempt=0,
        settings=schema.Tracker(mode=schema.TrackerMode(mode), group="sweep-1"),
    )


def make_tracker() -> Tracker:
    if len(sys.argv) == 2:
        return build_tracker(make_run("offline"))
    finish_s = float(sys.argv[3])
    return AsyncTracker(WandbRun(make_run(sys.argv[2]), upload_s=finish_s), finish_s)


def main() -> None:
    logging.basicConfig(level=logging.INFO)  # as the worker does
    tracker = make_tracker()
    step = 0
    for line in sys.stdin:
        for _ in range(int(line)):
            step += 1
            tracker.log([{"train/global_step": step, "train/loss": 1 / step}])
        print("logged", flush=True)
    tracker.summary({"loss/train_final": 0.5})
    tracker.finish(3)
    print(f"problem: {tracker.problem}", flush=True)
    print(f"telemetry: {os.environ['WANDB_ERROR_REPORTING']}", flush=True)


if __name__ == "__main__":
    main()
