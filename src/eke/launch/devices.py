"""Devices of this machine, and leases of them.

A lease is a lock (flock) on a file named after the device, shared by all users of the machine; the
kernel frees it when the pool and the worker that it was handed to are gone.
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
    """Lock a lease; returns its descriptor, None if it is held. EkeError without locks."""
    with contextlib.ExitStack() as opened:
        try:
            descriptor = open_shared_lock(lease_folder() / f"{name}.lock")
            opened.callback(os.close, descriptor)
            if not try_lock(descriptor):
                return None
        except OSError as error:
            why = f"{error.filename or lease_folder()}: {error.strerror or error}"
            elsewhere = f"export {LEASES}=FOLDER names another one"
            raise EkeError(f"no device can be leased: {why}; {elsewhere}") from error
        opened.pop_all()
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}\n".encode(), 0)
    return descriptor


def holder_of(name: str) -> str:
    """Description of the last holder of a lock; for display only."""
    with contextlib.suppress(OSError):
        if said := re.match(r"process \d+", read_text(lease_folder() / f"{name}.lock", 80)):
            return said[0]
    return "another process"


GATHERING = "gathering"
"""Name of the lock of the one pool on a machine that may hold devices it does not use yet. Two that
each held half of what they need would wait for each other for ever."""

Suits = Callable[[DeviceSlot], str]
"""Slot that could be had -> why it is of no use to a run now; empty when it is."""


@dataclass
class Grant:
    """Devices that a run holds."""

    slots: list[DeviceSlot]
    descriptors: list[int]
    """Their locks: handed to the worker, freed with it."""
    shared: bool
    """Whether other runs may use the same device or machine at the same time."""

    @property
    def name(self) -> str:
        """Display form: `GPU 0,1`."""
        kind = self.slots[0].name.split()[0]
        numbers = ",".join(slot.name.removeprefix(kind).strip() for slot in self.slots)
        return f"{kind} {numbers}".strip()

    def environment(self, num_processes: int = 1) -> dict[str, str]:
        """What the run's processes need to see these devices and no others."""
        if not self.slots[0].is_gpu:
            threads = len(self.cores()) // num_processes  # 0 where all cores may be used
            is_set = "OMP_NUM_THREADS" in os.environ
            return {"OMP_NUM_THREADS": str(threads)} if threads and not is_set else {}
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(slot.device for slot in self.slots),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }

    def cores(self) -> set[int]:
        """Cores its processes are held to; empty for all."""
        return {core for slot in self.slots for core in slot.cores}

    def uses(self, slot: DeviceSlot) -> bool:
        """Whether the run uses a slot's memory; every run uses the machine's."""
        return not slot.is_gpu or any(own.device == slot.device for own in self.slots)

    def release(self) -> None:
        """Close this process's hold; a worker that still lives keeps its own."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def occupied(device: str) -> str:
    """Why a GPU cannot be used now: a process without a lease computes on it, or has just ended."""
    if not device.startswith(("GPU-", "MIG-")):
        return ""
    found = processes_on(device)
    return f"used by process {found[0]}" if found else ""


@dataclass
class Devices:
    """All devices of one kind that this pool may use."""

    slots: Sequence[DeviceSlot]
    busy: Callable[[str], str] = occupied
    """Device -> why it cannot be used now; empty when it can."""
    shared: bool = False
    """Whether runs share devices."""
    slots_per_run: int | None = None
    """Slots that each run takes; None takes one for each of its devices."""
    _gathered: dict[DeviceSlot, int] = field(default_factory=dict)
    _gathering: int | None = None
    why: str = ""
    """Why the last request was not granted, for the user."""

    @property
    def count(self) -> int:
        """Different devices."""
        return len({slot.device for slot in self.slots})

    def needed(self, plan: Plan) -> int:
        """Slots that a run needs at once."""
        if self.slots_per_run is not None:
            return self.slots_per_run
        number = plan.batch.world_size * plan.batch.devices
        return min(number, self.count) if plan.device.kind == "cpu" else number

    def take(self, count: int, *, gather: bool = False, suits: Suits | None = None) -> Grant | None:
        """Lease so many different devices that suit, or none.

        `gather`, by one pool at a time, keeps what is free for the next call.
        """
        if not gather:
            self.let_go()
        self.why = ""
        taken = self._gathered if gather else {}
        if gather and self._gathering is None:
            self._gathering = try_lease(GATHERING)
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
        grant = Grant(list(taken), list(taken.values()), self.shared)
        taken.clear()
        self.let_go()
        return grant

    def let_go(self) -> None:
        """Free what was gathered for a run."""
        _close(self._gathered)
        if self._gathering is not None:
            os.close(self._gathering)
            self._gathering = None

    def _lease(self, slot: DeviceSlot, suits: Suits | None) -> int | None:
        descriptor = try_lease(slot.lease)
        if descriptor is None:
            self.why = f"{slot.name} is leased by {holder_of(slot.lease)}"
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
    """This machine's devices that a run may use, shared as its configuration says."""
    launcher = plan.config.launcher
    if plan.device.kind == "cuda":
        return Devices(gpu_slots(launcher.runs_per_device), shared=launcher.runs_per_device > 1)
    return Devices(cpu_slots(launcher.cpu_slots), shared=launcher.cpu_slots > 1)
