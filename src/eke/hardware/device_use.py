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
    """Registration of a training process on its devices, until it is closed.

    Processes with the same `run` are ranks of one run. No devices: they could not be identified.
    """

    def __init__(self, run: str, devices: frozenset[str], shared: bool | None = None) -> None:
        self._shared, self._size = shared, 0
        self._held = contextlib.ExitStack()
        with contextlib.suppress(OSError):
            if devices:
                self._register({"run": run, "devices": sorted(devices)})
                self._shared = bool(shared)
                # Registered before looking: of two that start at the same time, one sees the other.
                self._meet_others(run, devices)

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

    def _register(self, content: dict[str, object]) -> None:
        """Create the file. It gets its name when it is locked: an unlocked one is a dead run's."""
        self._path = lease_folder() / f"{_PREFIX}{secrets.token_hex(8)}"
        unnamed = self._path.with_name(f".{self._path.name}")
        with contextlib.ExitStack() as made:
            self._descriptor = open_shared_lock(unnamed)
            made.callback(os.close, self._descriptor)
            for each in (unnamed, self._path):
                made.callback(each.unlink, missing_ok=True)
            size = os.write(self._descriptor, f"{json.dumps(content)}\n".encode())
            if try_lock(self._descriptor):
                unnamed.rename(self._path)
                self._held, self._size = made.pop_all(), size

    def _meet_others(self, run: str, devices: frozenset[str]) -> None:
        """Note whether other runs use one of these devices, and tell each of them."""
        for path in self._path.parent.glob(f"{_PREFIX}*"):
            errors = (OSError, ValueError, TypeError, LookupError, RecursionError)
            with contextlib.suppress(*errors):  # it has just ended, or is no registration
                if path != self._path and not is_locked(path):
                    path.unlink()  # of a killed process; only its user can delete it
                    continue
                found = json.loads(read_text(path, _LIMIT).partition("\n")[0])
                if found["run"] == run or devices.isdisjoint(found["devices"]):
                    continue
                self._shared = True
                with open(open_file(path, os.O_WRONLY | os.O_APPEND, shared=True), "ab") as other:
                    other.write(b"another run\n")
