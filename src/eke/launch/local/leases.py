"""Leases of devices: two sweeps on one machine never get the same one.

A lease is a lock (flock) on a file that everybody on the machine knows by the device's name. The
kernel frees it when its last holder is gone: the pool, and the worker it was handed to. Neither a
killed pool nor a killed worker leaves a device taken; a worker that outlives its pool keeps it.
"""

import contextlib
import os
import re
from pathlib import Path

from eke.common.errors import EkeError
from eke.common.files import hold_folder, read_text
from eke.common.locks import open_shared_lock, try_lock

LEASES = "EKE_LEASES"
"""Environment variable with another folder for the locks: pools that use different ones do not see
each other."""

ELSEWHERE = f"export {LEASES}=FOLDER names another one"
"""What helps where the folder is of no use."""

ALL_USERS = Path("/tmp/eke-leases")
"""Where they are else. Not in `TMPDIR`, which may be each user's, shell's or job's own."""

SHARED_FOLDER = 0o1777
"""Everybody may make files, nobody may delete another's: as /tmp itself."""


def lease_folder() -> Path:
    """Where this machine's locks are; made if need be, for all its users."""
    folder = Path(os.environ.get(LEASES) or ALL_USERS)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        with hold_folder(folder, own=True) as made:
            os.fchmod(made, SHARED_FOLDER)
    return folder


def try_lease(name: str) -> int | None:
    """Take a lock by its name.

    Returns:
        Its file descriptor, held until it is closed; None when somebody else holds it.

    Raises:
        EkeError: the folder cannot be written, or its file system has no locks.
    """
    try:
        descriptor = open_shared_lock(lease_folder() / f"{name}.lock")
    except OSError as error:
        why = f"{error.filename}: {error.strerror or error}"
        raise EkeError(f"no device can be leased: {why}; {ELSEWHERE}") from error
    try:
        is_ours = try_lock(descriptor)
    except OSError as error:
        os.close(descriptor)
        why = f"its file system has no locks ({error.strerror})"
        raise EkeError(f"{lease_folder()}: {why}; {ELSEWHERE}") from error
    if not is_ours:
        os.close(descriptor)
        return None
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}\n".encode(), 0)
    return descriptor


def holder_of(name: str) -> str:
    """Who took a lock last, in words; only for people to read."""
    with contextlib.suppress(OSError):
        if said := re.match(r"process \d+", read_text(lease_folder() / f"{name}.lock", 80)):
            return said[0]
    return "another process"
