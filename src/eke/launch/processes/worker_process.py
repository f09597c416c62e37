"""Worker process in its own process group, with all output in train.log."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from eke.common.files import open_file
from eke.common.output import write_line
from eke.common.paths import SUPERVISOR, RunPaths
from eke.common.plugins import TRAINING_AGENT, TRAINING_WORKER
from eke.common.process_env import child_environment, module_command

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that stop a supervisor: Ctrl-C, `kill`, or a batch system's warning before a limit."""


@dataclass(frozen=True)
class NodeAssignment:
    """A node among the nodes of a run."""

    node: int
    """Index of the node. Node 0 has rank 0 and the run's lock."""
    num_nodes: int
    endpoint: str
    """Rendezvous of the processes of all nodes: `host:port`."""


def worker_command(
    paths: RunPaths, num_processes: int = 1, spot: NodeAssignment | None = None
) -> list[str]:
    """Return the command of the worker, or of the agent that starts a worker per rank."""
    if spot is None and num_processes == 1:
        return module_command(TRAINING_WORKER, str(paths.folder))
    where = [str(spot.node), str(spot.num_nodes), spot.endpoint] if spot else []
    return module_command(TRAINING_AGENT, str(paths.folder), str(num_processes), *where)


def worker_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment with eke importable and this process as supervisor."""
    own = {SUPERVISOR: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    return {**child_environment(), **own, **(extra or {})}


def start_process(
    command: Sequence[str],
    log: Path,
    descriptors: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a process in a new session, with its output in a log. Raise OSError on failure."""
    with open(open_file(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
            start_new_session=True, pass_fds=descriptors,
        )  # fmt: skip


class Worker:
    """Process group of a worker."""

    def __init__(
        self,
        paths: RunPaths,
        num_processes: int = 1,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
        spot: NodeAssignment | None = None,
    ) -> None:
        """Start the worker. Raise OSError on failure."""
        # Two nodes that append to one file of a network file system overwrite each other's lines.
        file = paths.node_log(spot.node) if spot and spot.node else paths.log
        command = worker_command(paths, num_processes, spot)
        self.process = start_process(command, file, descriptors, worker_environment(environment))

    def is_over(self) -> bool:
        """Return whether the worker has ended."""
        return self.process.poll() is not None

    def ask(self, number: int) -> None:
        """Forward a signal. The worker then saves a checkpoint and stops."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to all remaining processes of the group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def finish(self) -> int:
        """End the worker and return subprocess's exit code, negative for a signal."""
        self.kill()  # also its children: data loaders, a tracker's service
        return self.process.wait()


@contextmanager
def forward_signals(
    ask: Callable[[int], None],
    kill: Callable[[], None],
    say: str = "Stopping after this step. Press Ctrl-C again to kill.",
) -> Iterator[list[int]]:
    """Forward the first stop signal, so that the run saves, and kill on the second. Yield all."""
    heard: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        heard.append(number)
        if len(heard) > 1:
            kill()
            return
        ask(number)
        write_line(f"\n{say}", sys.stderr)

    before = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield heard
    finally:
        for restored, handler in before.items():
            signal.signal(restored, handler)


def become_worker(paths: RunPaths) -> NoReturn:
    """Replace this process by the worker of a rank behind rank 0, with the same launcher."""
    command = worker_command(paths)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, worker_environment())
