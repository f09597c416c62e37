"""Training processes on a device: of two runs at the same time, neither has a valid speed.

A training process holds a lock (flock) on a file in the lease folder that names the run and its
devices. A later run appends to the files of the runs that it meets, since it may end before them.
The kernel frees the lock of a killed process. Without a usable folder the answer is "unknown".
"""

import contextlib
import os
import platform
import secrets
from collections.abc import Iterable
from pathlib import Path

from eke.common.files import (
    hold_folder,
    is_locked,
    open_file,
    open_shared_lock,
    read_text,
    try_lock,
)

LEASES = "EKE_LEASES"
"""Environment variable with another folder for the locks; pools with different ones do not meet."""

ALL_USERS = Path("/tmp/eke-leases")
"""Default folder. Not in `TMPDIR`, which may differ per user, shell or job."""


def lease_folder() -> Path:
    """This machine's lock folder; created if missing, for all users."""
    folder = Path(os.environ.get(LEASES) or ALL_USERS)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        with hold_folder(folder, own=True) as made:
            os.fchmod(made, 0o1777)  # as of /tmp: anyone may create files, only the owner delete
    return folder


def cpu_cores() -> list[str]:
    """Identities of the cores that this process may use, different on each machine."""
    return [f"{platform.node()}-core-{core}" for core in os.sched_getaffinity(0)]


class DeviceUse:
    """Registration of a training process, a rank of `run`, on its devices, until it is closed."""

    def __init__(self, run: str, devices: Iterable[str], shared: bool | None = None) -> None:
        self._run, self._devices, self._shared = run, set(devices), shared
        self._held = contextlib.ExitStack()
        self._size = 0
        with contextlib.suppress(OSError):
            self._register()

    def is_shared(self) -> bool | None:
        """Whether another run has used a device since the start; None if unknown."""
        if self._size and os.fstat(self._descriptor).st_size > self._size:
            self._shared = True
        return self._shared

    def close(self) -> None:
        """End the registration; `is_shared` keeps its answer."""
        self.is_shared()
        self._size = 0
        self._held.close()

    def _register(self) -> None:
        """Write this run's file, then look: of two that start together, one sees the other."""
        path = lease_folder() / f"training-{secrets.token_hex(8)}"
        self._descriptor = open_shared_lock(path)
        self._held.callback(os.close, self._descriptor)
        self._held.callback(path.unlink, missing_ok=True)
        if not try_lock(self._descriptor):
            return
        words = " ".join([self._run, *self._devices]).encode()
        self._size = os.write(self._descriptor, words)
        self._shared = bool(self._shared)
        for other in path.parent.glob("training-*"):
            with contextlib.suppress(OSError):  # it has just ended, or is no file
                if other != path:
                    self._meet(other)

    def _meet(self, other: Path) -> None:
        """Note another run on these devices, and tell it; delete the file of a killed one."""
        run, *devices = read_text(other).split() or [self._run]
        if devices and not is_locked(other):  # it is locked before it is filled
            other.unlink()
        elif run != self._run and not self._devices.isdisjoint(devices):
            self._shared = True
            with open(open_file(other, os.O_WRONLY | os.O_APPEND, shared=True), "ab") as file:
                file.write(b" met")
