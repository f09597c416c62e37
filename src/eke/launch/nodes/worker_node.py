"""Another machine than the first of a run: starts processes when it is told to, and ends them."""

import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

from eke.common.cluster_task import Task
from eke.common.errors import EkeError
from eke.common.paths import RunPaths
from eke.launch.nodes.rendezvous import Line, read_invitation
from eke.launch.processes.collect_outcome import describe_exit
from eke.launch.processes.worker_process import Spot, Worker

POLL_S = 0.1
"""Between two looks at the processes."""

LOOK_S = 0.5
"""Between two looks for the invitation."""

GONE_S = 15.0
"""How long nobody may listen where the first machine said it does: it listens before it says so,
and until it lets us go. Else its death in between would hold all machines for `timeout_s`."""

END_S = 30.0
"""How long processes may still take to end once those of the first machine have: they have agreed
on that, and write nothing any more."""

ALONE_S = 600.0
"""The same where the first machine's watcher is gone: its processes, if they are there, save."""


def follow(file: Path, task: Task, timeout_s: float, problem: str = "") -> None:
    """Take part in the run that the first machine leads, until it lets us go.

    Args:
        file: where the first one writes its invitation.
        task: this one.
        timeout_s: longest wait for it.
        problem: why this machine cannot take part.

    Raises:
        EkeError: the first one is not to be found.
    """
    line = connect(file, task, timeout_s, problem)
    said: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_listen, args=[line, said], daemon=True).start()
    try:
        Follower(line, task).serve(said)
    finally:
        line.close()


def connect(file: Path, task: Task, timeout_s: float, problem: str) -> Line:
    """Find the first machine, and greet it.

    Raises:
        EkeError: it is not to be found.
    """
    deadline = time.monotonic() + timeout_s
    why, refused_since = f"{file} has not appeared", float("inf")
    while True:
        if found := read_invitation(file, task.step):
            try:
                connection = socket.create_connection((found.host, found.port), timeout=10)
                connection.settimeout(None)
                line = Line(connection)
                line.send({"node": task.node, "secret": found.secret, "problem": problem})
                return line
            except OSError as error:
                why = f"{found.host}:{found.port}: {error}"
                refused = isinstance(error, ConnectionRefusedError)
                refused_since = min(refused_since, time.monotonic()) if refused else float("inf")
        if time.monotonic() > min(deadline, refused_since + GONE_S):
            raise EkeError(f"machine {task.node} cannot reach the first one of this run: {why}")
        time.sleep(LOOK_S)


class Follower:
    """The processes of this machine, one attempt after the other."""

    def __init__(self, line: Line, task: Task) -> None:
        self._line, self._task = line, task
        self._worker: Worker | None = None

    def serve(self, said: "queue.Queue[dict[str, Any] | None]") -> None:
        """Do what the first machine says; returns once it lets us go, or is gone."""
        while True:
            try:
                message = said.get(timeout=POLL_S)
            except queue.Empty:
                self._look()
                continue
            if message is None:
                return self._end(ALONE_S)
            if "begin" in message:
                self._begin(message)
            else:
                self._end(END_S)
            if "leave" in message:
                return None

    def _begin(self, message: dict[str, Any]) -> None:
        spot = Spot(self._task.node, int(message["num_nodes"]), str(message["endpoint"]))
        try:
            paths = RunPaths(Path(message["begin"]))
            self._worker = Worker(paths, int(message["num_processes"]), spot=spot)
        except OSError as error:
            why = f"{message['begin']} cannot be written: {error.strerror}"
            self._line.send({"idle": True, "problem": why})

    def _look(self) -> None:
        """Say so when the processes have ended by themselves."""
        if self._worker is None or not self._worker.is_over():
            return
        code, self._worker = self._worker.finish(), None
        self._line.send({"idle": True, "problem": describe_exit(code) if code else ""})

    def _end(self, patience_s: float) -> None:
        if self._worker is None:  # it has been said: once for each beginning
            return
        deadline = time.monotonic() + patience_s
        while not self._worker.is_over() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._worker.finish()
        self._worker = None
        self._line.send({"idle": True})


def _listen(line: Line, said: "queue.Queue[dict[str, Any] | None]") -> None:
    while (message := line.receive()) is not None:
        said.put(message)
    said.put(None)
