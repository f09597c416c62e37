"""Detection of runs that share a device, whose timings are invalid.

A training process locks (flock) a file in the lease folder with the name of its run and its
devices. A later run on these devices appends to the file, since it may end earlier. The kernel
releases the lock of a killed process. Without a usable folder sharing is unknown.
"""

import contextlib
import os
import platform
import secrets
from collections.abc import Iterable
from pathlib import Path

from eke.common.files import (
    is_locked,
    open_file,
    open_shared_lock,
    open_trusted_dir,
    read_text,
    try_lock,
)

LEASES = "EKE_LEASES"
"""Environment variable for the lease folder. Runs with different folders do not detect another."""

_ALL_USERS = Path("/tmp/eke-leases")
"""Default lease folder. `TMPDIR` may differ per user, shell or job."""


def lease_folder() -> Path:
    """Return the lease folder of this machine, created for all users if missing."""
    folder = Path(os.environ.get(LEASES) or _ALL_USERS)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        with open_trusted_dir(folder, own=True) as made:
            os.fchmod(made, 0o1777)  # as /tmp: all users may create files, only owners delete them
    return folder


def cpu_cores() -> list[str]:
    """Return names of the cores that this process may use, unique across machines."""
    return [f"{platform.node()}-core-{core}" for core in os.sched_getaffinity(0)]


class DeviceUse:
    """Registration of a rank of `run` on its devices until `close`."""

    def __init__(self, run: str, devices: Iterable[str], shared: bool | None = None) -> None:
        self._run, self._devices, self._shared = run, set(devices), shared
        self._held = contextlib.ExitStack()
        self._size = 0
        with contextlib.suppress(OSError):
            self._register()

    def is_shared(self) -> bool | None:
        """Return whether another run has used a device since the start, None if unknown."""
        if self._size and os.fstat(self._descriptor).st_size > self._size:
            self._shared = True
        return self._shared

    def close(self) -> None:
        """End the registration and keep the result of `is_shared`."""
        self.is_shared()
        self._size = 0
        self._held.close()

    def _register(self) -> None:
        """Write this run's file, then read others: one of two simultaneous runs detects both."""
        path = lease_folder() / f"training-{secrets.token_hex(8)}"
        self._descriptor = open_shared_lock(path)
        self._held.callback(os.close, self._descriptor)
        self._held.callback(path.unlink, missing_ok=True)
        if not try_lock(self._descriptor):
            return
        self._size = os.write(self._descriptor, " ".join([self._run, *self._devices]).encode())
        self._shared = bool(self._shared)  # no longer unknown
        for other in path.parent.glob("training-*"):
            with contextlib.suppress(OSError):  # just ended, or not a file
                if other != path:
                    self._record_sharing(other)

    def _record_sharing(self, other: Path) -> None:
        """Record another run on these devices in both files. Delete the file of a killed run."""
        run, *devices = read_text(other).split() or [self._run]
        if devices and not is_locked(other):  # files are locked before they are written
            other.unlink()
        elif run != self._run and not self._devices.isdisjoint(devices):
            self._shared = True
            with open(open_file(other, os.O_WRONLY | os.O_APPEND, shared=True), "ab") as file:
                file.write(b" met")
