"""What the tracker's tests share: a run to track, its folder, and processes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE_S, REPO
from unit.plan.record.samples import bare_record

from eke.common.paths import RunPaths
from eke.config import schema
from eke.plan.record import Loss, Record, metrics, write_record
from eke.results.trackers import TrackedRun, Tracker, build_tracker
from eke.results.trackers.tracker import Row

CHILD = Path(__file__).with_name("child.py")
RUN_ID = "0123456789abcdef"


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., TrackedRun]:
    """Builds a run in `tmp_path`; keyword arguments replace its fields, `mode` the tracker's."""

    def make(mode: str = "offline", **changes: Any) -> TrackedRun:
        fields: dict[str, Any] = {
            "run_id": RUN_ID,
            "name": "precision=bf16 optimizer=adafactor",
            "tags": ("cpu",),
            "notes": "python train.py precision=bf16 optimizer=adafactor",
            "factors": {"precision": "bf16", "optim": "adafactor"},
            "config": {"optim": {"lr": 1e-3}, "seed": 7},
            "directory": tmp_path,
            "attempt": 0,
            "settings": schema.Tracker(mode=schema.TrackerMode(mode), group="sweep-1"),
        }
        return TrackedRun(**{**fields, **changes})

    return make


def child_environment(**changes: str) -> dict[str, str]:
    """Environment of a process that is to run this checkout's eke."""
    return {**os.environ, "PYTHONPATH": str(REPO / "src"), **changes}


def start_child(folder: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """Starts child.py; in a process of its own wandb-core may be killed and the exit be watched."""
    return subprocess.Popen(
        [sys.executable, str(CHILD), str(folder), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(**environment),
    )


def ask(child: "subprocess.Popen[str]", num_rows: int) -> None:
    """Have the child log rows, and wait until `log` returned."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{num_rows}\n")
    child.stdin.flush()
    assert child.stdout.readline() == "logged\n"


def make_record(**changes: Any) -> Record:
    """A record of a run that ended well, in which little was measured."""
    fields = {
        "steps_done": 3,
        "config": {"seed": 7, "tracker": {"option": "wandb", "project": "eke", "group": "g"}},
        "plan": {"device": {"name": "cpu"}},
        "environment": {"python": "3.11.0"},
        "command": ["python", "train.py"],
        "loss": Loss(eval_final=0.1 + 0.2),
    }
    return bare_record(**{**fields, **changes})


def make_folder(runs: Path, *batches: list[Row], name: str = RUN_ID, **changes: Any) -> RunPaths:
    """A run folder as eke leaves it."""
    paths = RunPaths(runs / name)
    paths.folder.mkdir(parents=True)
    for batch in batches or (rows(1, 2, 3),):
        metrics.append_rows(paths.metrics, batch)
    write_record(paths, make_record(**{"run_id": name, **changes}))
    return paths


def rows(*steps: int, attempt: int = 0) -> list[Row]:
    """Rows of metrics.jsonl."""
    row = {"attempt": attempt}
    return [{"train/global_step": step, **row, "train/loss": 1 / step} for step in steps]


def track(run: TrackedRun, *batches: list[Row], code: int = 0) -> Tracker:
    """What the worker does with rows: first the file, then the tracker."""
    tracker = build_tracker(run)
    for batch in batches:
        metrics.append_rows(RunPaths(run.directory).metrics, batch)
        tracker.log(batch)
    tracker.finish(code)
    return tracker


def find_wandb_files(directory: Path) -> list[Path]:
    """W&B's transaction logs below a run folder, oldest first."""
    return sorted(directory.glob("wandb/*run-*/*.wandb"))


def find_cores(pid: int) -> list[int]:
    """Processes called wandb-core that `pid` started."""
    listings = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for listing in listings for child in listing.read_text().split()]
    return [c for c in children if Path(f"/proc/{c}/comm").read_text().strip() == "wandb-core"]


def wait_until(condition: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    """Waits for another process to show something; only what hangs reaches the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
