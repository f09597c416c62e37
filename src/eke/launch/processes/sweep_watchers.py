"""Which processes watch over a sweep, so that what waits there is told apart from what nobody runs.

Like the lock of a run, theirs are gone with them, however they end.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eke.common.files import open_file, own_folder
from eke.common.locks import is_locked, try_lock
from eke.common.paths import SweepPaths


@dataclass(frozen=True)
class Watcher:
    """A process that starts what is left of a sweep."""

    host: str
    process: str
    lock: Path
    """Held by it."""


@contextmanager
def watching(paths: SweepPaths) -> Iterator[None]:
    """Be known as a process that starts what is left of a sweep.

    Where the folder cannot be written, or files have no locks, it is not: that stops no sweep.
    """
    lock = paths.watcher(socket.gethostname(), os.getpid())
    made = lock.with_name(f".new{lock.name}")
    with contextlib.ExitStack() as held:
        held.callback(_forget_killed, paths)  # also those that were killed beside this one
        with contextlib.suppress(OSError):
            own_folder(lock.parent)
            descriptor = open_file(made, os.O_RDWR | os.O_CREAT)
            held.callback(os.close, descriptor)
            held.callback(_forget, lock)
            held.callback(_forget, made)
            try_lock(descriptor)
            os.replace(made, lock)  # nobody sees it unlocked, and takes it for one that is over
        _forget_killed(paths)
        yield


def _forget_killed(paths: SweepPaths) -> None:
    for left in paths.watchers():
        if not is_locked(left):
            _forget(left)


def _forget(lock: Path) -> None:
    with contextlib.suppress(OSError):
        lock.unlink(missing_ok=True)


def watchers_of(paths: SweepPaths) -> list[Watcher]:
    """Those who watch over a sweep now; there may be several, who share its runs."""
    found = []
    for lock in paths.watchers():
        if is_locked(lock):
            host, process = paths.who_watches(lock)
            found.append(Watcher(host, process, lock))
    return found


def watchers_in(folder: Path) -> list[Watcher]:
    """Those who watch over the sweep in a folder, or over any of those in its folders."""
    folders = [folder] if SweepPaths(folder).sweep.exists() else sorted(folder.glob("sweep-*"))
    return [watcher for each in folders for watcher in watchers_of(SweepPaths(each))]
