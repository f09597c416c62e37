"""Training processes on a device: of two runs at the same time, neither has a valid speed.

A training process holds a lock (flock) on a small file in the lease folder. It contains the run and
its devices. The later run appends a line to the file of the earlier one, whose end may come after
the later one has left. Any user of the machine may do so. The kernel frees the lock of a killed
process. Without a usable folder the answer is "unknown", and the run goes on.
"""

import contextlib
import json
import os
import platform
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from eke.common.files import (
    hold_folder,
    is_locked,
    open_file,
    open_shared_lock,
    read_text,
    try_lock,
)

LEASES = "EKE_LEASES"
"""Environment variable with another folder for the locks: pools that use different ones do not see
each other."""

ALL_USERS = Path("/tmp/eke-leases")
"""Default folder. Not in `TMPDIR`, which may differ per user, shell or job."""

_SHARED_FOLDER = 0o1777
"""Anyone may create files, only the owner may delete them, as in /tmp."""

_PREFIX, _LIMIT = "training-", 1 << 20
"""Name of a file here, and the most bytes that are read of one: 1,000 cores take 50,000."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Differs between machines; the containers of one machine have the same (random(4))."""


def lease_folder() -> Path:
    """This machine's lock folder; created if missing, for all users."""
    folder = Path(os.environ.get(LEASES) or ALL_USERS)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        with hold_folder(folder, own=True) as made:
            os.fchmod(made, _SHARED_FOLDER)
    return folder


def cpu_cores() -> frozenset[str]:
    """Identities of the cores that this process may use, different on each machine."""
    try:
        machine = _BOOT.read_text().strip()
    except OSError:
        machine = platform.node()
    return frozenset(f"cpu-{machine}-{core}" for core in os.sched_getaffinity(0))


class DeviceUse:
    """Registration of a training process on its devices, as a context.

    Processes with the same `run` are ranks of one run. No devices: they could not be identified.
    """

    def __init__(self, run: str, devices: frozenset[str], shared: bool | None = None) -> None:
        self._run, self._devices, self._shared = run, devices, shared
        self._path, self._descriptor, self._size = Path(), -1, 0

    def __enter__(self) -> "DeviceUse":
        with contextlib.suppress(OSError):
            if self._devices:
                self._register()
                # Registered before looking: of two that start at the same time, one sees the other.
                self._shared = self._meet_others() or bool(self._shared)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.is_shared()
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = -1

    def is_shared(self) -> bool | None:
        """Whether another run has used a device since the start; None if unknown."""
        if self._descriptor >= 0 and os.fstat(self._descriptor).st_size > self._size:
            self._shared = True
        return self._shared

    def _register(self) -> None:
        """Create the file. It gets its name when it is locked: an unlocked one is a dead run's."""
        path = lease_folder() / f"{_PREFIX}{secrets.token_hex(8)}"
        unnamed = path.with_name(f".{path.name}")
        descriptor = open_shared_lock(unnamed)
        try:
            content = json.dumps({"run": self._run, "devices": sorted(self._devices)})
            size = os.write(descriptor, f"{content}\n".encode())
            if not try_lock(descriptor):
                raise OSError
            unnamed.rename(path)
        except OSError:
            os.close(descriptor)
            unnamed.unlink(missing_ok=True)
            raise
        self._path, self._descriptor, self._size = path, descriptor, size

    def _meet_others(self) -> bool:
        """Return whether another run uses one of these devices, and tell each such run."""
        others = list(self._others())
        for path in others:
            with contextlib.suppress(OSError):  # it has just ended
                other = open_file(path, os.O_WRONLY | os.O_APPEND, shared=True)
                try:
                    os.write(other, b"another run\n")
                finally:
                    os.close(other)
        return bool(others)

    def _others(self) -> Iterator[Path]:
        for path in self._path.parent.glob(f"{_PREFIX}*"):
            if path == self._path:
                continue
            if not is_locked(path):  # of a killed process; only its user can delete it
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            with contextlib.suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
                found = json.loads(read_text(path, _LIMIT).partition("\n")[0])
                if found["run"] != self._run and not self._devices.isdisjoint(found["devices"]):
                    yield path
