"""Run, signal and end a worker behind a command prefix, with only the standard library.

    python prefix_runner.py start FOLDER TICKET DIGEST
    python prefix_runner.py signal|end|check FOLDER [SIGNAL]

Run by its path, to avoid shell quoting and an import of eke. The worker inherits a lock and is
alive while the lock is held. Its process id is only valid behind the prefix.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LOCK = ".prefix.lock"
"""File in the run's folder with the worker's process id, locked while the worker lives."""

_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags for opening the lock, safe if another user has planted a link or a FIFO there."""

ALIVE, GONE, BUSY = 0, 3, 4
"""Exit codes: the worker is alive, has ended, could not be ended."""

_END_S = 10.0
"""Longest wait for a killed process, in seconds."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals forwarded to the worker if the prefix forwards them."""


def order_digest(order: object) -> str:
    """Return the hash of a ticket's content."""
    return hashlib.sha256(json.dumps(order, sort_keys=True).encode()).hexdigest()


def start(folder: Path, ticket: str, digest: str) -> int:
    """Run the worker of a ticket with this digest. Return its exit code, 128 + N for signal N."""
    order = json.loads((folder / ticket).read_text())
    if order_digest(order) != digest:
        sys.stderr.write(f"{folder / ticket}: another process has changed the command\n")
        return BUSY
    lock = os.open(folder / LOCK, _OPEN | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.stderr.write(f"{folder}: its earlier worker is still alive\n")
        return BUSY
    # Rank variables of a container or a shell must not reach the worker.
    here = {k: value for k, value in os.environ.items() if not re.match(order["foreign"], k)}
    worker = subprocess.Popen(
        order["command"], stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[lock],
        env={**here, **order["environment"], order["supervisor"]: str(os.getpid())},
    )  # fmt: skip
    for number in _FORWARDED:
        signal.signal(number, lambda got, _: worker.send_signal(got))
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(worker.pid).encode(), 0)
    os.close(lock)
    code = worker.wait()
    return 128 - code if code < 0 else code


def worker_of(folder: Path) -> int | None:
    """Return the worker's process id, 0 if it is not yet known, None without a worker."""
    try:
        lock = os.open(folder / LOCK, _OPEN)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        process = int(os.pread(lock, 20, 0) or b"0")
        return process if _has_open(process, lock) else 0
    else:
        return None
    finally:
        os.close(lock)


def _has_open(process: int, lock: int) -> bool:
    try:
        files = Path(f"/proc/{process}/fd").iterdir()
        return any(os.path.samestat(os.fstat(lock), each.stat()) for each in files)
    except OSError:  # a file was closed meanwhile: callers try again
        return False


def _send(folder: Path, number: str) -> int:
    deadline = time.monotonic() + _END_S
    while (worker := worker_of(folder)) == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    if not worker:
        return GONE
    os.kill(worker, int(number))
    return ALIVE


def _end(folder: Path) -> int:
    """Kill the worker's process group and wait for its end."""
    deadline = time.monotonic() + _END_S
    while (worker := worker_of(folder)) is not None:
        if worker:
            with contextlib.suppress(ProcessLookupError):  # only its children are left
                os.killpg(worker, signal.SIGKILL)
        if time.monotonic() > deadline:
            sys.stderr.write(f"{folder}: process {worker} does not end\n")
            return BUSY
        time.sleep(0.05)
    return GONE


if __name__ == "__main__":
    ACTIONS: dict[str, Callable[..., int]] = {
        "start": start,
        "signal": _send,
        "end": _end,
        "check": lambda folder: GONE if worker_of(folder) is None else ALIVE,
    }
    sys.exit(ACTIONS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:]))
