"""Writing files so that a crash at any moment leaves the old content or the new, never a mix."""

import contextlib
import fcntl
import json
import math
import os
from pathlib import Path
from typing import Any


def fsync_directory(folder: Path) -> None:
    """Make renames inside `folder` durable (POSIX: a rename lives in the directory's data)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content`: temporary name, fsync, rename, fsync of the folder.

    Raises:
        OSError: the disk is full or the folder cannot be written; `path` is then as it was.
    """
    # The name of a folder may hold bytes that are no UTF-8.
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    fsync_directory(path.parent)


def replace_link(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target`, in place of the link that may be there.

    Raises:
        OSError: the file system has no links, or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically as indented, strict JSON (see `plain` for not-a-number)."""
    write_atomic(path, json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON.
    """
    return json.loads(path.read_bytes())


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
        descriptor = os.open(path, os.O_RDONLY)
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


def append_line(path: Path, line: str) -> None:
    """Append one line with a single `write`: a kill can lose at most the line being written.

    Raises:
        OSError: the disk is full; a part of the line may be there.
    """
    data = (line + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        # A disk that fills up takes a part without a word; writing the rest says why.
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def plain(value: Any) -> Any:
    """`value` with non-finite floats spelled out (`"nan"`, `"inf"`): JSON cannot say them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
