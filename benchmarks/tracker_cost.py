"""What a tracker costs: `python benchmarks/tracker_cost.py OPTION` (wandb, tensorboard, ...).

Prints seconds of start-up on the worker's own thread (imports), of opening the run with its first
row, milliseconds per row when ten are written at a time, and bytes. Rows hold 12 numbers.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from eke.config import schema
from eke.results.trackers import TrackedRun
from eke.results.trackers.accelerate import MLflowRun, TensorBoardRun, TrackioRun
from eke.results.trackers.async_tracker import TrackerClient
from eke.results.trackers.wandb import WandbRun

NUM_ROWS, WRITE = 1000, 10


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(option: str) -> None:
    """Measure one tracker, offline and in a new folder."""
    from accelerate import Accelerator  # slow: after the arguments are checked

    os.environ["WANDB_MODE"] = "offline"
    Accelerator(cpu=True)
    with tempfile.TemporaryDirectory() as folder:
        settings = schema.Tracker(option=option)
        config = {"optimizer": {"lr": 1e-3}}
        run = TrackedRun("0" * 16, "", (), "", {}, config, Path(folder), 0, settings)
        mirrors: dict[str, Callable[[], TrackerClient]] = {
            "wandb": lambda: WandbRun(run, upload_s=10),
            "tensorboard": lambda: TensorBoardRun(run),
            "mlflow": lambda: MLflowRun(run),
            "trackio": lambda: TrackioRun(run),
        }
        mirror = mirrors[option]()
        values = {f"train/value_{number}": 0.5 for number in range(12)}
        rows = [{"train/global_step": step, **values} for step in range(NUM_ROWS + WRITE)]
        prepared = seconds(mirror.prepare)
        opened = seconds(lambda: (mirror.open(), mirror.log(rows[:WRITE])))
        writes = [rows[start : start + WRITE] for start in range(WRITE, len(rows), WRITE)]
        logged = sum(seconds(lambda write=write: mirror.log(write)) for write in writes)
        closed = seconds(lambda: mirror.close(0))
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    print(
        f"{option}: start-up {prepared:.2f} s, open {opened:.2f} s, "
        f"{1e3 * logged / NUM_ROWS:.2f} ms a row, close {closed:.2f} s, {size / 1e6:.2f} MB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("option", choices=("wandb", "tensorboard", "mlflow", "trackio"))
    main(parser.parse_args().option)
