"""What the tracker's tests share: a run to track, a server to talk to, a clean environment."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eke import schema
from eke.track import TrackedRun

from .stub import Server

CHILD = Path(__file__).with_name("child.py")
RUN_ID = "0123456789abcdef"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's account, server or settings; what the tracker itself sets is undone."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")  # recorded, so that it is restored


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.answers.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def online(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, with the environment of a user who has an account there."""
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "ab" * 20)
    return server


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., TrackedRun]:
    """Builds a run in `tmp_path`; keyword arguments replace its fields, `mode` the tracker's."""

    def make(mode: str = "offline", **changes: Any) -> TrackedRun:
        fields: dict[str, Any] = {
            "run_id": RUN_ID,
            "name": "precision=bf16 optimizer=adafactor",
            "group": "sweep-1",
            "tags": ("cpu",),
            "notes": "python train.py precision=bf16 optimizer=adafactor",
            "factors": {"precision": "bf16", "optim": "adafactor"},
            "config": {"optim": {"lr": 1e-3}, "seed": 7},
            "directory": tmp_path,
            "attempt": 0,
            "settings": schema.Tracker(mode=schema.TrackerMode(mode)),
        }
        return TrackedRun(**{**fields, **changes})

    return make


def start_child(folder: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """Starts child.py; in a process of its own wandb-core may be killed and the exit be watched."""
    return subprocess.Popen(
        [sys.executable, str(CHILD), str(folder), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def ask(child: "subprocess.Popen[str]", num_rows: int) -> None:
    """Have the child log rows, and wait until `log` returned."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{num_rows}\n")
    child.stdin.flush()
    assert child.stdout.readline() == "logged\n"


def rows(*steps: int) -> list[dict[str, float | int | str]]:
    """Rows of metrics.jsonl."""
    return [{"train/global_step": step, "attempt": 0, "train/loss": 1 / step} for step in steps]


def find_wandb_files(directory: Path) -> list[Path]:
    """W&B's transaction logs below a run folder, oldest first."""
    return sorted(directory.glob("wandb/*run-*/*.wandb"))


def find_cores(pid: int) -> list[int]:
    """Processes called wandb-core that `pid` started."""
    listings = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for listing in listings for child in listing.read_text().split()]
    return [c for c in children if Path(f"/proc/{c}/comm").read_text().strip() == "wandb-core"]
