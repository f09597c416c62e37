"""Runs in fresh processes, finished or not."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support import PATIENCE_S, REPO, TINY, Finished, environment

SHORT = (
    *TINY,
    "experiment=smoke",
    "data=synthetic",
    "data.num_samples=64",
    "batch.per_device=4",
)
"""A whole run in a few seconds."""


def run_folders(tmp: Path) -> list[Path]:
    """The run folders below `runs`, oldest first."""
    folders = [p for p in (tmp / "runs").iterdir() if p.is_dir()]
    return sorted(folders, key=lambda p: p.stat().st_ctime)


def single_runs(tmp: Path) -> list[Path]:
    """The run folders below `runs`, without those of sweeps."""
    return [folder for folder in run_folders(tmp) if not folder.name.startswith("sweep-")]


def record_of(folder: Path) -> dict[str, Any]:
    """record.json of a run folder."""
    content: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return content


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """All complete rows of metrics.jsonl."""
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def curve(folder: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, of its last attempt."""
    best = {r["train/global_step"]: r for r in rows_of(folder) if "train/loss" in r}
    return [(best[s]["train/loss"], best[s]["train/grad_norm"]) for s in sorted(best)]


def attempts(folder: Path) -> list[dict[str, Any]]:
    """What each attempt has noted at its start."""
    lines = (folder / "attempts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def run_in(
    folder: Path, command: Sequence[str], timeout: float = PATIENCE_S, **variables: str
) -> Finished:
    """A command to its end, typed in a folder by a user without settings."""
    done = subprocess.run(
        command, cwd=folder, env={**environment(folder), **variables}, capture_output=True,
        text=True, timeout=timeout, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout, done.stderr)


class Live:
    """A `python train.py` that is still running."""

    def __init__(
        self,
        tmp: Path,
        arguments: tuple[str, ...],
        *,
        forked: bool = False,
        within: Callable[[list[str]], list[str]] = list,
    ) -> None:
        """With forked workers (forked_workers.py), or as users have it; `within`: its prefix."""
        script = ["tests/forked_workers.py", "train"] if forked else ["train.py"]
        self.tmp = tmp
        self._read: dict[Path, tuple[int, int]] = {}
        self.before = self.last_step()
        self.process = subprocess.Popen(
            within([sys.executable, str(REPO / script[0]), *script[1:], *arguments]),
            cwd=tmp,
            env=environment(tmp),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def last_step(self) -> int:
        """The highest step in any metrics.jsonl, of which only what is new is read."""
        for file in self.tmp.glob("runs/*/metrics.jsonl"):
            start, highest = self._read.get(file, (0, 0))
            with open(file, "rb") as rows:
                rows.seek(start)
                new = rows.read()
            whole = new[: new.rfind(b"\n") + 1]
            steps = [json.loads(row)["train/global_step"] for row in whole.splitlines()]
            self._read[file] = start + len(whole), max([highest, *steps])
        return max((highest for _, highest in self._read.values()), default=0)

    def wait_for_more(self, steps: int) -> None:
        """Until it is so many steps further than when it was started."""
        self.wait_for_step(self.before + steps)

    def wait_for_step(self, step: int, timeout: float = PATIENCE_S) -> None:
        """Until metrics.jsonl has the row of this step."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.last_step() >= step:
                return
            assert self.process.poll() is None, self.finish()
            time.sleep(0.05)
        raise TimeoutError(f"step {step} never came")

    def worker_pid(self) -> int:
        """The process that trains."""
        attempts = next(self.tmp.glob("runs/*/attempts.jsonl")).read_text().splitlines()
        return int(json.loads(attempts[-1])["pid"])

    def signal(self, number: signal.Signals) -> None:
        """To the supervisor."""
        os.kill(self.process.pid, number)

    def finish(self, timeout: float = PATIENCE_S) -> str:
        """Wait for the end; everything it printed."""
        out, _ = self.process.communicate(timeout=timeout)
        return out.decode()
