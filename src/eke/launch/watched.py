"""Which process watches over a sweep, so that what waits there is told apart from what nobody runs.

Like the lock of a run, it is gone with its process, however that ends.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eke.files import is_locked, try_lock
from eke.paths import SweepPaths


@contextmanager
def watching(paths: SweepPaths) -> Iterator[None]:
    """Be known as the process that starts what is left of a sweep.

    Of two that watch over the same one the first is known. Where the folder cannot be written, or
    files have no locks, nobody is: that stops no sweep.
    """
    try:
        paths.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(paths.lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            if try_lock(descriptor):
                os.ftruncate(descriptor, 0)
                who = f"process {os.getpid()} on {socket.gethostname()}\n"
                os.pwrite(descriptor, who.encode(), 0)
        yield
    finally:
        os.close(descriptor)


def is_watched(paths: SweepPaths) -> bool:
    """Whether a process will start what is left of a sweep."""
    return is_locked(paths.lock)


def watched_sweeps(folder: Path) -> list[SweepPaths]:
    """Those that a process watches over: the one in a folder, else those in its folders."""
    folders = [folder] if SweepPaths(folder).sweep.exists() else sorted(folder.glob("sweep-*"))
    return [paths for paths in map(SweepPaths, folders) if is_watched(paths)]


def watcher_of(paths: SweepPaths) -> tuple[str, str]:
    """Host and process id of who watches over a sweep; empty where that is not written down."""
    try:
        words = paths.lock.read_text(errors="replace").split()
    except OSError:
        words = []
    return (words[3], words[1]) if len(words) == 4 else (socket.gethostname(), "")
