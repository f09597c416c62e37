"""Read and replace files of runs and sweeps safely in folders that other users may write to.

A crash leaves the old content or the new, never a mix. Other users cannot redirect a write, as a
folder is held by a descriptor while a file in it is opened. Only regular files are opened. Links in
the path made by other users are rejected, and any link as the last component. Files are only
written to folders of this user. Locks (flock) end with the process that holds them.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import pwd
import re
import secrets
import shutil
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

READ_LIMIT = 16 << 20
"""Largest file read at once, bytes. The list of ten thousand jobs takes a third of it. Parsed JSON
takes thirty times as much memory."""

_LINK_ITSELF: int = getattr(os, "O_PATH", 0) | os.O_NOFOLLOW
"""Flags that open a link instead of its target. Without O_PATH (Linux) links are rejected."""

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class UntrustedPathError(OSError):
    """Error for a file or folder that another user may have planted."""

    def __init__(self, why: str, path: object) -> None:
        super().__init__(errno.EPERM, why, str(path))

    def __str__(self) -> str:
        """Omit the error number, which is not of the system."""
        return f"{self.filename}: {self.strerror}"


@contextmanager
def open_trusted_dir(path: Path, own: bool = False) -> Iterator[int]:
    """Hold a folder by a descriptor, for `dir_fd`, so that renaming it has no effect.

    Refused for links in the path that are not of this user or root. `own` requires a folder of
    this user that is not a link.
    """
    opened: list[int] = []

    def open_(name: str, flags: int, within: int | None = None) -> int:
        try:
            opened.append(os.open(name, flags | os.O_CLOEXEC, dir_fd=within))
        except OSError as error:
            raise _named(error, path) from error
        return opened[-1]

    try:
        at, rest, links = open_(path.anchor or ".", os.O_RDONLY), deque(_steps(path)), 0
        while rest:
            name = rest.popleft()
            step = open_(name, _LINK_ITSELF, at)
            found = os.fstat(step)
            if not stat.S_ISLNK(found.st_mode):
                at = step
                continue
            if own and not rest:
                raise UntrustedPathError("is a link", path)
            if not _is_mine(found, at):
                raise UntrustedPathError(f"{name} is a link that {_owner(found)} made", path)
            if (links := links + 1) > 40:  # as in Linux (path_resolution(7))
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            # Read by its descriptor: the name may be another link by now.
            target = PurePath(os.readlink("", dir_fd=step))
            at = open_("/", os.O_RDONLY) if target.anchor else at
            rest.extendleft(reversed(_steps(target)))
        folder = open_(".", os.O_RDONLY | os.O_DIRECTORY, at)
        if own and not _is_mine(found := os.fstat(folder), folder):
            raise UntrustedPathError(
                f"belongs to {_owner(found)}, and only its owner may write there", path
            )
        yield folder
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _steps(path: PurePath) -> tuple[str, ...]:
    return path.parts[1:] if path.anchor else path.parts


def _is_mine(found: os.stat_result, folder: int) -> bool:
    """Return whether this user or root owns a file. Root may use any file."""
    me = os.geteuid()
    return me == 0 or found.st_uid in (me, 0) or found.st_uid == _own_user_id(folder)


def _own_user_id(folder: int) -> int | None:
    """Return this user's id on a file system with its own ids (CIFS): the owner of a new file."""
    name = f".{secrets.token_hex(8)}.tmp"
    try:
        made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600, dir_fd=folder)
    except OSError:
        return None
    try:
        return os.fstat(made).st_uid
    finally:
        os.close(made)
        os.unlink(name, dir_fd=folder)


def _owner(found: os.stat_result) -> str:
    try:
        return f"another user ({pwd.getpwuid(found.st_uid).pw_name})"
    except KeyError:
        return f"another user (uid {found.st_uid})"


def make_private_dir(path: Path, private: bool = False) -> Path:
    """Create a folder if missing. Refused if it belongs to another user or is not `private`."""
    path.mkdir(0o700 if private else 0o777, parents=True, exist_ok=True)
    with open_trusted_dir(path, own=True) as folder:
        if private and os.fstat(folder).st_mode & 0o022:
            raise UntrustedPathError("is writable by others", path)
        return path


def open_file(path: Path, flags: int, mode: int = 0o666, shared: bool = False) -> int:
    """Open a regular file in a folder of this user and return its descriptor.

    `flags` are without O_TRUNC, as the file is checked after opening. Refused for a link, another
    user's file, or anything but a regular file. `shared` permits folders and files of other users.
    """
    with open_trusted_dir(path.parent, own=not shared) as folder:
        return _open_regular(path, flags, mode, folder, shared)


def _named(error: OSError, path: Path) -> OSError:
    """Return an error with the full path for a call relative to a folder."""
    if error.errno == errno.ELOOP:
        return UntrustedPathError("is a link", path)
    if error.errno == errno.ENXIO:  # a FIFO without a reader, a socket
        return UntrustedPathError("is not a regular file", path)
    return OSError(error.errno, error.strerror, str(path))


def _open_regular(
    path: Path, flags: int, mode: int = 0o666, folder: int | None = None, shared: bool = True
) -> int:
    name = path if folder is None else path.name
    try:
        descriptor = os.open(name, flags | _SAFE, mode, dir_fd=folder)
    except OSError as error:
        raise _named(error, path) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UntrustedPathError("is not a regular file", path)
        if folder is not None and found.st_nlink > 1:  # a hard link to another file of this user
            raise UntrustedPathError("has more than one hard link", path)
        if folder is not None and not (shared or _is_mine(found, folder)):
            raise UntrustedPathError(f"belongs to {_owner(found)}", path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_to_read(path: Path) -> int:
    """Open any user's regular file for reading. Refused for links and other kinds."""
    return _open_regular(path, os.O_RDONLY)


def read_bytes(path: Path, limit: int = READ_LIMIT, own: bool = False) -> bytes:
    """Read any user's file, or with `own` only this user's. Refused for more than `limit` bytes."""
    with open(open_file(path, os.O_RDONLY) if own else open_to_read(path), "rb") as file:
        found = os.fstat(file.fileno())
        if own and os.geteuid() == 0 != found.st_uid:
            with open_trusted_dir(path.parent) as folder:
                if found.st_uid != _own_user_id(folder):  # NFS maps root's files to another user
                    raise UntrustedPathError(f"belongs to {_owner(found)}", path)
        if (size := found.st_size) > limit:
            raise UntrustedPathError(f"has more than {limit >> 20} MiB", path)
        return file.read(size)


def is_trusted(path: Path) -> bool:
    """Return whether this user made the file, in their own folder. Root trusts only root."""
    try:
        return path.exists() and read_bytes(path, own=True) is not None
    except OSError:
        return False


def read_text(path: Path, limit: int = READ_LIMIT) -> str:
    """Read any user's file as UTF-8, replacing invalid bytes. Errors as in `read_bytes`."""
    return read_bytes(path, limit).decode(errors="replace")


def last_bytes(path: Path, count: int) -> bytes:
    """Read the end of any user's file. Errors as in `open_to_read`."""
    with open(open_to_read(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - count))
        return file.read(count)


def fsync_directory(folder: Path) -> None:
    """Make renames inside a folder durable (POSIX stores them in the directory's data)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: str | bytes, shared: bool = False, mode: int = 0o666) -> None:
    """Replace a file by a temporary one, with fsync. After an OSError it is unchanged.

    `shared` permits a folder of another user.
    """
    # A folder name may hold bytes that are not UTF-8.
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    temporary = f".{path.name[:200]}.{secrets.token_hex(8)}.tmp"
    with open_trusted_dir(path.parent, own=not shared) as folder:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE
            with open(os.open(temporary, flags, mode, dir_fd=folder), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise OSError(error.errno, error.strerror, str(path)) from error


def replace_link(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target`, replacing a link. OSError if impossible."""
    temporary = f".{path.name}.{secrets.token_hex(8)}.tmp"
    with open_trusted_dir(path.parent, own=True) as folder:
        os.symlink(target, temporary, dir_fd=folder)
        os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)


def remove_tree(path: Path) -> None:
    """Delete a folder of this user and its content, ignoring errors. Links are not followed."""
    with contextlib.suppress(OSError), open_trusted_dir(path.parent, own=True) as folder:
        shutil.rmtree(path.name, ignore_errors=True, dir_fd=folder)


def write_json(path: Path, value: Any) -> None:
    """Write a value atomically as indented, strict JSON (see `json_safe` for not-a-number)."""
    write_atomic(path, json.dumps(json_safe(value), indent=2, allow_nan=False) + "\n")


def read_json(path: Path, limit: int = READ_LIMIT, own: bool = False) -> Any:
    """Parse a JSON file read by `read_bytes`. ValueError if it is not JSON."""
    try:
        return json.loads(read_bytes(path, limit, own))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def append_line(path: Path, line: str) -> None:
    """Append one line with a single `write`, so that an error loses at most this line."""
    data = (line + "\n").encode()
    descriptor = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        # A disk that fills up accepts a part without error. Writing the rest raises it.
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def terminate_last_line(path: Path) -> None:
    """End an incomplete last line, so that the next row starts on a new line."""
    if path.exists() and last_bytes(path, 1) not in (b"", b"\n"):
        append_line(path, "")


def json_safe(value: Any) -> Any:
    """Return a value with non-finite floats as text (`"nan"`, `"inf"`), which JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value


def open_shared_lock(path: Path) -> int:
    """Open, or create, a file that all users of a folder may lock, whatever the umask."""
    # First without O_CREAT, with which Linux refuses to open another user's file in a folder like
    # /tmp (fs.protected_regular).
    try:
        return open_file(path, os.O_RDWR, shared=True)
    except FileNotFoundError:
        pass
    try:
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666, shared=True)
    except FileExistsError:  # another process created it first
        return open_file(path, os.O_RDWR, shared=True)
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, 0o666)
    return descriptor


def try_lock(descriptor: int) -> bool:
    """Take an exclusive lock (flock) on an open file. Return False if it is locked."""
    try:  # OSError: the file system has no locks, e.g. Lustre mounted without `flock`
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock (flock) of a file, without blocking."""
    try:
        descriptor = open_to_read(path)
    except OSError:
        return False
    try:
        # A shared lock, released immediately: concurrent checks do not disturb each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def who_has_open(path: Path) -> dict[int, str]:
    """Return visible processes with a file open -> id in their PID namespace. May raise OSError."""
    wanted, found = path.stat(), {}
    for process in [Path("/proc/self").resolve(strict=True), *Path("/proc").glob("[0-9]*")]:
        with contextlib.suppress(OSError):  # another user's, or ended
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed
                    if os.path.samestat(descriptor.stat(), wanted):
                        status = (process / "status").read_text()
                        numbers = re.search(r"^NSpid:.*\b(\d+)$", status, re.M)
                        found[int(process.name)] = numbers[1] if numbers else process.name
                        break
    return found
