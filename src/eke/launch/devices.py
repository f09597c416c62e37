"""Devices of this machine and their leases.

A lease is a lock (flock) on a file named after the device, shared by all users of the machine. The
kernel frees it when the pool and the worker that inherited it have ended.
"""

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from eke.common.errors import EkeError
from eke.common.files import open_shared_lock, read_text, try_lock
from eke.hardware import DeviceSlot, cpu_slots, gpu_slots, processes_on
from eke.hardware.device_use import LEASES, lease_folder
from eke.plan.planner import Plan


def try_lease(name: str) -> int | None:
    """Lock a lease. Return its descriptor, None if it is held. Raise EkeError without locks."""
    with contextlib.ExitStack() as opened:
        try:
            descriptor = open_shared_lock(lease_folder() / f"{name}.lock")
            opened.callback(os.close, descriptor)
            if not try_lock(descriptor):
                return None
        except OSError as error:
            why = f"{error.filename or lease_folder()}: {error.strerror or error}"
            fix = f"Another folder: export {LEASES}=FOLDER"
            raise EkeError(f"cannot lease a device: {why}. {fix}") from error
        opened.pop_all()
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}\n".encode(), 0)
    return descriptor


def holder_of(name: str) -> str:
    """Return a description of the last holder of a lock, for display."""
    with contextlib.suppress(OSError):
        if said := re.match(r"process \d+", read_text(lease_folder() / f"{name}.lock", 80)):
            return said[0]
    return "another process"


_MULTI_DEVICE_LOCK = "gathering"
"""Name of a machine-wide lock: two pools that each hold part of their devices would deadlock."""

_SlotFilter = Callable[[DeviceSlot], str]
"""Check of a slot: the reason why a run cannot use it now, empty if it can."""


@dataclass
class DeviceLease:
    """Devices held by a run."""

    slots: list[DeviceSlot]
    descriptors: list[int]
    """File descriptors of the locks, inherited by the worker and freed with it."""
    shared: bool
    """True if other runs may use the same device or machine at the same time."""

    @property
    def name(self) -> str:
        """Display name, such as `GPU 0,1`."""
        kind = self.slots[0].name.split()[0]
        numbers = ",".join(slot.name.removeprefix(kind).strip() for slot in self.slots)
        return f"{kind} {numbers}".strip()

    def environment(self, num_processes: int = 1) -> dict[str, str]:
        """Return the environment that limits the run's processes to these devices."""
        if not self.slots[0].is_gpu:
            threads = len(self.cores()) // num_processes  # 0 if all cores may be used
            is_set = "OMP_NUM_THREADS" in os.environ
            return {"OMP_NUM_THREADS": str(threads)} if threads and not is_set else {}
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(slot.device for slot in self.slots),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }

    def cores(self) -> set[int]:
        """Return the cores of the run's processes, empty for all cores."""
        return {core for slot in self.slots for core in slot.cores}

    def uses(self, slot: DeviceSlot) -> bool:
        """Return whether the run uses a slot's memory. Every run uses host memory."""
        return not slot.is_gpu or any(own.device == slot.device for own in self.slots)

    def release(self) -> None:
        """Close this process's locks. A running worker keeps its own."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def why_busy(device: str) -> str:
    """Return why a GPU is busy, or "" if it is free."""
    if not device.startswith(("GPU-", "MIG-")):
        return ""
    found = processes_on(device)
    return f"used by process {found[0]}" if found else ""


@dataclass
class Devices:
    """Devices of one kind that this pool may use."""

    slots: Sequence[DeviceSlot]
    busy: Callable[[str], str] = why_busy
    """Check of a device: the reason why it is busy, empty if it is free."""
    shared: bool = False
    """True if runs share devices."""
    slots_per_run: int | None = None
    """Slots per run. None: one for each device of the run."""
    _gathered: dict[DeviceSlot, int] = field(default_factory=dict)
    _gathering: int | None = None
    why: str = ""
    """Why the last request was not granted, for display."""

    @property
    def count(self) -> int:
        """Number of different devices."""
        return len({slot.device for slot in self.slots})

    def needed(self, plan: Plan) -> int:
        """Return the number of slots that a run needs."""
        if self.slots_per_run is not None:
            return self.slots_per_run
        number = plan.batch.world_size * plan.batch.devices
        return min(number, self.count) if plan.device.kind == "cpu" else number

    def take(
        self, count: int, *, gather: bool = False, suits: _SlotFilter | None = None
    ) -> DeviceLease | None:
        """Lease `count` different devices that suit. `gather`: keep free ones for the next call."""
        if not gather:
            self.release_all()
        self.why = ""
        taken = self._gathered if gather else {}
        if gather and self._gathering is None:
            self._gathering = try_lease(_MULTI_DEVICE_LOCK)
        for slot in self.slots:
            if len(taken) == count:
                break
            if slot.device in {other.device for other in taken}:
                continue
            if (descriptor := self._lease(slot, suits)) is not None:
                taken[slot] = descriptor
        if len(taken) < count:
            if self._gathering is None:
                _close(taken)
            return None
        grant = DeviceLease(list(taken), list(taken.values()), self.shared)
        taken.clear()
        self.release_all()
        return grant

    def release_all(self) -> None:
        """Release the devices gathered for a run."""
        _close(self._gathered)
        if self._gathering is not None:
            os.close(self._gathering)
            self._gathering = None

    def _lease(self, slot: DeviceSlot, suits: _SlotFilter | None) -> int | None:
        descriptor = try_lease(slot.lease)
        if descriptor is None:
            if (holder := holder_of(slot.lease)) != f"process {os.getpid()}":  # not its own runs
                self.why = f"{slot.name} is leased by {holder}"
            return None
        if not self.shared and (why := self.busy(slot.device)):
            self.why = f"{slot.name} is {why}"
        elif suits is not None and (why := suits(slot)):
            self.why = f"{slot.name}: {why}"
        else:
            return descriptor
        os.close(descriptor)
        return None


def _close(taken: dict[DeviceSlot, int]) -> None:
    for descriptor in taken.values():
        os.close(descriptor)
    taken.clear()


def find_devices(plan: Plan) -> Devices:
    """Return this machine's devices for a run, shared if its configuration shares them."""
    launcher = plan.config.launcher
    if plan.device.kind == "cuda":
        return Devices(gpu_slots(launcher.runs_per_device), shared=launcher.runs_per_device > 1)
    return Devices(cpu_slots(launcher.cpu_slots), shared=launcher.cpu_slots > 1)
