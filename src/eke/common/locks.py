"""Locks (flock) of runs, sweeps and devices, which end with the process that holds them."""

import contextlib
import fcntl
import os
from pathlib import Path

from eke.common.files import open_file, open_to_read


def open_shared_lock(path: Path) -> int:
    """Open a file that every user of a folder may lock, whatever the umask; made if need be.

    It is made only where there is nothing: Linux refuses to open another user's file with O_CREAT
    in a folder like /tmp (fs.protected_regular).

    Raises:
        Refused: it is a link, or no regular file.
        OSError: it cannot be opened.
    """
    try:
        return open_file(path, os.O_RDWR, shared=True)
    except FileNotFoundError:
        pass
    try:
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666, shared=True)
    except FileExistsError:  # somebody was faster
        return open_file(path, os.O_RDWR, shared=True)
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, 0o666)
    return descriptor


def try_lock(descriptor: int) -> bool:
    """Take an open file's lock (flock) for this process alone; False when somebody holds it.

    Raises:
        OSError: the file system has no locks, as Lustre where it is mounted without `flock`.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock (flock) of a file; only looked at, never waited for."""
    try:
        descriptor = open_to_read(path)
    except OSError:
        return False
    try:
        # Shared, and given back at once: two who look do not disturb each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def has_open(process: int, path: Path) -> bool:
    """Whether a process of this machine has a file open; False for one that may not be looked at.

    Raises:
        OSError: `path` does not exist, or this system does not tell.
    """
    wanted = path.stat()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found = descriptor.stat()
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False
