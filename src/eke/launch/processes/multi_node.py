"""Runs on several nodes: rendezvous, the coordinator and its followers.

The first node, the coordinator, listens and writes its address into a shared file. The followers
connect with the secret in the file. Messages are lines of JSON. A lost connection is a lost node.
"""

import contextlib
import hmac
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from eke.common.errors import EkeError
from eke.common.files import make_private_dir, read_json, write_atomic
from eke.common.paths import RunPaths
from eke.common.process_env import SlurmTask
from eke.launch.processes.run_attempt import RunAttempt, describe_exit, end_of_ranks
from eke.launch.processes.worker_process import NodeAssignment, Worker
from eke.plan.planner import Plan
from eke.plan.record import Outcome, Record, write_record

_ANY_ADDRESS = "0.0.0.0"  # only compared, if `listen` found no other
"""Address of a socket that listens on all interfaces."""

_MAX_LINE = 65536


class Rendezvous(NamedTuple):
    """Address at which the coordinator listens."""

    step: str
    """SLURM step of the run's nodes."""
    host: str
    port: int
    secret: str


def read_invitation(file: Path, step: str) -> Rendezvous | None:
    """Return the invitation to this step, None if there is none yet."""
    try:
        os.listdir(file.parent)  # refreshes the cache of a network file system
        found = Rendezvous(**read_json(file, own=True))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.step == step else None


def _host_name() -> str:
    """Return this node's name for the others: MASTER_ADDR, as in torchrun, else the host name."""
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def listen(backlog: int) -> socket.socket:
    """Listen at the host's address, else at all addresses. Raise OSError without a port."""
    with contextlib.suppress(OSError):  # the address may belong to the network, not to this node
        address = socket.gethostbyname(_host_name())
        if "MASTER_ADDR" in os.environ or not address.startswith("127."):
            return socket.create_server((address, 0), backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


class JsonConnection:
    """A connection on which both sides send lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection = connection
        self._lines = connection.makefile("rb")

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a message. Return False if the peer is gone."""
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """Wait for a message. Return None if there will be no more."""
        try:
            found = json.loads(self._lines.readline(_MAX_LINE) or b"null")
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def close(self) -> None:
        """Close the connection for the peer and for a local thread that reads from it."""
        self.end()
        self._lines.close()
        self._connection.close()

    def end(self) -> None:
        """Stop sending and receiving."""
        with contextlib.suppress(OSError):  # the peer has closed it
            self._connection.shutdown(socket.SHUT_RDWR)


POLL_S = 0.05

_JOIN_TIMEOUT_S = 60.0
"""Longest wait at the end for nodes that have not connected, in seconds."""

HELLO_S = 10.0
"""Time limit for a connecting peer to send the secret, in seconds."""

MAX_PENDING_CONNECTIONS = 16
"""Connections beyond the run's nodes that may be open without the secret. Others have to wait."""

_END_S = 90.0
"""Longest wait in seconds for the followers to end an attempt. They kill their processes sooner."""


class Coordinator:
    """The coordinator's view of its followers, by node rank."""

    def __init__(self, file: Path, task: SlurmTask) -> None:
        """Listen and write the invitation. Raise EkeError without a port or a writable folder."""
        self.count, self._file = task.count, file
        self._lock = threading.Lock()
        self._lines: dict[int, JsonConnection] = {}
        self._lost: dict[int, str] = {}  # permanently
        self._failed: dict[int, str] = {}  # in this attempt
        self._busy: set[int] = set()
        self._unknown = threading.BoundedSemaphore(MAX_PENDING_CONNECTIONS + task.count)
        try:
            self._server = listen(backlog=max(16, task.count))
            address, port = self._server.getsockname()
            host = _host_name() if address == _ANY_ADDRESS else address
            self._secret = secrets.token_hex(16)
            make_private_dir(file.parent)
            invitation = Rendezvous(task.step, host, port, self._secret)
            write_atomic(file, json.dumps(invitation._asdict()), mode=0o600)
        except OSError as error:
            raise EkeError(f"{file}: cannot be written ({error.strerror})") from error
        threading.Thread(target=self._accept, daemon=True).start()

    def gather(self, timeout_s: float) -> None:
        """Wait for the followers. Raise EkeError if a node does not connect or cannot take part."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._lost:
                    raise EkeError(_in_order(self._lost))
                missing = ", ".join(str(n) for n in range(1, self.count) if n not in self._lines)
            if not missing:
                return
            if time.monotonic() > deadline:
                late = f"did not reach {_host_name()} within {timeout_s:.0f} s"
                fix = "To use another name: export MASTER_ADDR=NAME"
                raise EkeError(f"nodes {missing} of {self.count} {late}. {fix}")
            time.sleep(POLL_S)

    def begin(self, folder: Path, num_processes: int) -> str:
        """Have each follower start its processes. Return their rendezvous endpoint, `host:port`."""
        with socket.create_server(("", 0)) as server:
            endpoint = f"{_host_name()}:{server.getsockname()[1]}"  # a free port
        message = {"begin": str(folder.absolute()), "num_processes": num_processes}
        with self._lock:
            self._busy = set(self._lines)
            self._failed.clear()
        self._tell({**message, "num_nodes": self.count, "endpoint": endpoint})
        return endpoint

    def trouble(self) -> str:
        """Return the failure of another node, "" if there is none."""
        with self._lock:
            return _in_order(self._lost | self._failed)

    def has_lost_one(self) -> bool:
        """Return whether a follower is gone. Without it, no further attempt can start."""
        with self._lock:
            return bool(self._lost)

    def end(self) -> None:
        """Have the followers end their processes, and wait for it."""
        self._tell({"end": True})
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            with self._lock:
                if not self._busy & set(self._lines):
                    return
            time.sleep(POLL_S)

    def close(self) -> None:
        """Release the followers, including nodes that are still connecting."""
        with contextlib.suppress(EkeError):
            self.gather(_JOIN_TIMEOUT_S)
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
            self._unknown.acquire()  # wait if too many peers have not sent the secret yet
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            # One thread each: a silent peer delays no other peer.
            threading.Thread(
                target=self._listen, args=[JsonConnection(connection)], daemon=True
            ).start()

    def _listen(self, line: JsonConnection) -> None:
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
                self._lost[node] = f"node {node} of this run: {problem}"
        while (said := line.receive()) is not None:
            with self._lock:
                if said.get("idle"):
                    self._busy.discard(node)
                if problem := said.get("problem"):
                    self._failed[node] = f"node {node} of this run: {problem}"
        with self._lock:
            if self._lines.pop(node, None):  # else it was released
                self._lost.setdefault(node, f"node {node} of this run is gone")
        line.close()


def _in_order(by_node: dict[int, str]) -> str:
    return "; ".join(by_node[node] for node in sorted(by_node))


LEFT_BEHIND_S = 30.0
"""Seconds that processes outlive another node. NCCL waits `distributed.timeout_s`."""


class MultiNodeRun(RunAttempt):
    """One attempt at a run on several nodes, in a locked folder.

    After a signal, the processes of all nodes agree on the last step. `kill` ends the local
    processes immediately, and other nodes' processes follow.
    """

    def __init__(self, plan: Plan, paths: RunPaths, head: Coordinator) -> None:
        """Wait for the followers, lock the folder and start. Raise BusyError or EkeError."""
        self._head = head
        self._left_behind: float | None = None  # time.monotonic() at a follower's failure
        self._killed_for = ""  # reason of the kill
        head.gather(plan.ranks.timeout_s)
        make_private_dir(paths.folder)
        count = plan.processes_per_node
        spot = NodeAssignment(0, head.count, head.begin(paths.folder, count))
        try:
            start = partial(Worker, paths, count, spot=spot)
            super().__init__(plan, paths, count, lambda lock: start(descriptors=[lock]))
        except BaseException:
            head.end()
            raise

    def is_over(self) -> bool:
        """Return whether the local processes have ended. End them if a follower has failed."""
        if super().is_over():
            return True
        if trouble := self._head.trouble():
            now = time.monotonic()
            self._left_behind = self._left_behind or now
            if now - self._left_behind > LEFT_BEHIND_S and not self._killed_for:
                self._killed_for = trouble
                self.kill()
        return False

    def finish(self) -> Record:
        """End the attempt and return its record. Raise RunError if the folder is not writable."""
        self.kill()
        trouble = self._killed_for or self._head.trouble()
        self._head.end()  # first: the followers may report which process died
        record = super().finish()
        failure = record.failure
        unexplained = self._killed_for and not end_of_ranks(self.paths, record.attempt)
        if failure and trouble and (failure.lost_contact or unexplained):
            failure.message = trouble  # the lost node, since no failed process is known
            record.outcome, record.exit_code = Outcome.crashed.name, Outcome.crashed.exit_code
            write_record(self.paths, record)
        return record


def launch_attempt(
    plan: Plan, paths: RunPaths, head: Coordinator | None, num_processes: int | None = None
) -> RunAttempt:
    """Start one attempt, here and on the followers. Errors as in `MultiNodeRun`."""
    if head is not None:
        return MultiNodeRun(plan, paths, head)
    return RunAttempt(plan, paths, num_processes or plan.batch.world_size)


WORKER_POLL_S = 0.1

LOOK_S = 0.5

_GONE_S = 15.0
"""Seconds of refused connections after which the coordinator counts as dead."""

WORKER_END_S = 30.0
"""Seconds for processes to end after the coordinator's, which agreed with them on the end."""

LOST_COORDINATOR_TIMEOUT_S = 600.0
"""The same if the coordinator's watcher is gone. Its processes may still be saving."""


def follow(file: Path, task: SlurmTask, timeout_s: float, problem: str = "") -> None:
    """Follow the coordinator to its end, or report a `problem`. Raise EkeError if out of reach."""
    with contextlib.closing(connect(file, task, timeout_s, problem)) as line:
        _Follower(line, task).serve()


def connect(file: Path, task: SlurmTask, timeout_s: float, problem: str) -> JsonConnection:
    """Connect to the coordinator and send the secret. Raise EkeError if it cannot be reached."""
    deadline = time.monotonic() + timeout_s
    why, refused_since = f"{file} has not appeared", float("inf")
    while True:
        if found := read_invitation(file, task.step):
            try:
                connection = socket.create_connection((found.host, found.port), timeout=10)
                connection.settimeout(None)
                line = JsonConnection(connection)
                line.send({"node": task.node, "secret": found.secret, "problem": problem})
                return line
            except OSError as error:
                why = f"{found.host}:{found.port}: {error}"
                refused = isinstance(error, ConnectionRefusedError)
                refused_since = min(refused_since, time.monotonic()) if refused else float("inf")
        if time.monotonic() > min(deadline, refused_since + _GONE_S):
            raise EkeError(f"node {task.node} cannot reach the first node of this run: {why}")
        time.sleep(LOOK_S)


class _Follower:
    """The processes of one follower, one attempt after the other."""

    def __init__(self, line: JsonConnection, task: SlurmTask) -> None:
        self._line, self._task = line, task
        self._worker: Worker | None = None

    def serve(self) -> None:
        """Follow the coordinator's commands until it releases this node or is gone."""
        said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._listen, args=[said], daemon=True).start()
        while True:
            try:
                message = said.get(timeout=WORKER_POLL_S)
            except queue.Empty:
                self._report_ended()
                continue
            if message is None:
                return self._end(LOST_COORDINATOR_TIMEOUT_S)
            if "begin" in message:
                self._begin(message)
            else:
                self._end(WORKER_END_S)
            if "leave" in message:
                return None

    def _begin(self, message: dict[str, Any]) -> None:
        spot = NodeAssignment(self._task.node, int(message["num_nodes"]), str(message["endpoint"]))
        try:
            paths = RunPaths(Path(message["begin"]))
            self._worker = Worker(paths, int(message["num_processes"]), spot=spot)
        except OSError as error:
            why = f"{message['begin']} cannot be written: {error.strerror}"
            self._line.send({"idle": True, "problem": why})

    def _report_ended(self) -> None:
        """Report processes that have ended without a command."""
        if self._worker is None or not self._worker.is_over():
            return
        code, self._worker = self._worker.finish(), None
        self._line.send({"idle": True, "problem": describe_exit(code) if code else ""})

    def _end(self, patience_s: float) -> None:
        if self._worker is None:  # already reported, once per start
            return
        deadline = time.monotonic() + patience_s
        while not self._worker.is_over() and time.monotonic() < deadline:
            time.sleep(WORKER_POLL_S)
        self._worker.finish()
        self._worker = None
        self._line.send({"idle": True})

    def _listen(self, said: "queue.Queue[dict[str, Any] | None]") -> None:
        while (message := self._line.receive()) is not None:
            said.put(message)
        said.put(None)
