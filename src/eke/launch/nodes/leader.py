"""The first machine of a run: gathers the others, tells them when to start, knows who is left."""

import contextlib
import hmac
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from eke.common.cluster_task import Task
from eke.common.errors import EkeError
from eke.common.files import own_folder
from eke.launch.nodes.rendezvous import (
    ANY_ADDRESS,
    Invitation,
    Line,
    free_port,
    host_name,
    listen,
    write_invitation,
)

POLL_S = 0.05
"""Between two looks at what the others have said."""

COME_S = 60.0
"""Longest wait, where there is nothing to do for them, for machines that have not come yet."""

HELLO_S = 10.0
"""In which who connects must show the secret."""

STRANGERS = 16
"""Connections, besides the machines of the run, that have not shown it yet; more have to wait."""

END_S = 90.0
"""Longest wait for the others at the end of an attempt; each kills what does not end sooner."""


class Head:
    """What the first machine knows of the others, by their numbers."""

    def __init__(self, file: Path, task: Task) -> None:
        """Listen, and invite.

        Args:
            file: where to write the invitation, in a folder that all machines see.
            task: this one.

        Raises:
            EkeError: the folder cannot be written, or there is no port to listen on.
        """
        self.count, self._file = task.count, file
        self._lock = threading.Lock()
        self._lines: dict[int, Line] = {}
        self._lost: dict[int, str] = {}  # for good
        self._failed: dict[int, str] = {}  # in this attempt
        self._busy: set[int] = set()
        self._unknown = threading.BoundedSemaphore(STRANGERS + task.count)
        try:
            self._server = listen(backlog=max(16, task.count))
            address, port = self._server.getsockname()
            host = host_name() if address == ANY_ADDRESS else address
            self._secret = secrets.token_hex(16)
            own_folder(file.parent)
            write_invitation(file, Invitation(task.step, host, port, self._secret))
        except OSError as error:
            raise EkeError(f"{file}: cannot invite other machines: {error.strerror}") from error
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Head":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def gather(self, timeout_s: float) -> None:
        """Wait for the others.

        Raises:
            EkeError: some have not come in time, or cannot take part.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._lost:
                    raise EkeError(_in_order(self._lost))
                missing = sorted(set(range(1, self.count)) - set(self._lines))
            if not missing:
                return
            if time.monotonic() > deadline:
                names = ", ".join(map(str, missing))
                raise EkeError(
                    f"machines {names} of {self.count} did not reach {host_name()} within "
                    f"{timeout_s:.0f} s (MASTER_ADDR names it in another way)"
                )
            time.sleep(POLL_S)

    def begin(self, folder: Path, num_processes: int) -> str:
        """Have each machine start its processes; returns where all of them meet: `host:port`."""
        endpoint = f"{host_name()}:{free_port()}"
        message = {"begin": str(folder.absolute()), "num_processes": num_processes}
        with self._lock:
            self._busy = set(self._lines)
            self._failed.clear()
        self._tell({**message, "num_nodes": self.count, "endpoint": endpoint})
        return endpoint

    def trouble(self) -> str:
        """What has gone wrong on another machine; empty if nothing has."""
        with self._lock:
            return _in_order(self._lost | self._failed)

    def has_lost_one(self) -> bool:
        """Whether a machine is gone: nothing can be started again without it."""
        with self._lock:
            return bool(self._lost)

    def end(self) -> None:
        """Have the others end what they started, and wait until they have."""
        self._tell({"end": True})
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            with self._lock:
                if not self._busy & set(self._lines):
                    return
            time.sleep(POLL_S)

    def close(self) -> None:
        """Let the others go, those as well who are still on their way."""
        with contextlib.suppress(EkeError):
            self.gather(COME_S)
        self._tell({"leave": True})
        self._server.close()
        with self._lock:
            lines, self._lines = self._lines, {}
        for line in lines.values():
            line.close()
        with contextlib.suppress(OSError):
            self._file.unlink()

    def _tell(self, message: dict[str, Any]) -> None:
        with self._lock:
            lines = list(self._lines.values())
        for line in lines:
            line.send(message)

    def _accept(self) -> None:
        while True:
            self._unknown.acquire()
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            # Each in a thread of its own: one that says nothing holds up nobody.
            threading.Thread(target=self._listen, args=[Line(connection)], daemon=True).start()

    def _listen(self, line: Line) -> None:
        limit = threading.Timer(HELLO_S, line.end)
        limit.daemon = True
        limit.start()
        hello = line.receive() or {}
        limit.cancel()
        self._unknown.release()
        node = hello.get("node")
        known = hmac.compare_digest(str(hello.get("secret")).encode(), self._secret.encode())
        if not known or not isinstance(node, int) or not 0 < node < self.count:
            return line.close()
        with self._lock:
            if node in self._lines:
                return line.close()
            self._lines[node] = line
            if problem := hello.get("problem"):
                self._lost[node] = f"machine {node} of this run: {problem}"
        while (said := line.receive()) is not None:
            with self._lock:
                if said.get("idle"):
                    self._busy.discard(node)
                if problem := said.get("problem"):
                    self._failed[node] = f"machine {node} of this run: {problem}"
        with self._lock:
            if self._lines.pop(node, None):  # else it was let go
                self._lost.setdefault(node, f"machine {node} of this run is gone")
        line.close()


def _in_order(told: dict[int, str]) -> str:
    return "; ".join(told[node] for node in sorted(told))
