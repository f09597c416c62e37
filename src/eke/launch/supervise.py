"""One worker in a process group of its own, watched to its end; standard library only.

The worker prints into train.log and nowhere else, so that the log is complete even when it dies in
native code, and so that a single run, a pool and SLURM can all use the same worker.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import eke
from eke.launch.follow import View
from eke.paths import SUPERVISOR, RunPaths

POLL_S = 0.1
"""Seconds between two looks at the worker."""


def worker_command(paths: RunPaths, num_processes: int = 1) -> list[str]:
    """The command that trains: the worker, or the agent that starts one for each rank."""
    if num_processes == 1:
        return [sys.executable, "-m", "eke.run.worker", str(paths.folder)]
    return [sys.executable, "-m", "eke.run.agent", str(paths.folder), str(num_processes)]


def worker_environment() -> dict[str, str]:
    """This process's environment, with eke importable and the supervisor named."""
    source = str(Path(eke.__file__).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    path = source if not inherited else os.pathsep.join([source, inherited])
    return {**os.environ, "PYTHONPATH": path, SUPERVISOR: str(os.getpid()), "PYTHONUNBUFFERED": "1"}


def supervise(paths: RunPaths, view: View, lock: int | None = None, num_processes: int = 1) -> int:
    """Start the worker and watch it to its end; returns subprocess's code (negative: a signal).

    The first Ctrl-C or SIGTERM asks it to save and stop, the second kills its process group.

    Args:
        paths: the run folder.
        view: shows what the worker writes.
        lock: descriptor that holds the run folder; the worker holds it, too.
        num_processes: to start; one where somebody else has started the other ranks.
    """
    with open(paths.log, "ab") as log:
        worker = subprocess.Popen(
            worker_command(paths, num_processes),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=worker_environment(),
            start_new_session=True,
            pass_fds=[] if lock is None else [lock],
        )
    try:
        with forward_signals(worker):
            while worker.poll() is None:
                view.update()
                time.sleep(POLL_S)
    finally:
        # Whatever the worker started (loader processes, a tracker's service) ends with it.
        kill_group(worker.pid)
        worker.wait()
    view.update(last=True)
    return worker.returncode


@contextmanager
def forward_signals(worker: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Hand SIGINT and SIGTERM on to the worker: politely once, then with SIGKILL."""
    asked: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        if asked:
            kill_group(worker.pid)
            return
        asked.append(number)
        sys.stderr.write("\nstopping after this step; once more kills\n")
        worker.send_signal(number)

    before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
    for listened in (signal.SIGINT, signal.SIGTERM):
        before[listened] = signal.signal(listened, forward)
    try:
        yield
    finally:
        for restored, handler in before.items():
            signal.signal(restored, handler)


def kill_group(group: int) -> None:
    """SIGKILL to all processes of a group that are still there."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
