"""Handing devices to runs: whole sets at once, and one by one to the run that waits for many."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from eke.hardware import DeviceSlot, cpu_slots, gpu_slots, processes_on
from eke.launch.local.leases import holder_of, try_lease

GATHERING = "gathering"
"""Name of the lock of the one pool on a machine that may hold devices it does not use yet. Two that
each held half of what they need would wait for each other for ever."""

Busy = Callable[[str], str]
"""Device -> why it cannot be used now; empty when it can."""

Suits = Callable[[DeviceSlot], str]
"""Slot that could be had -> why it is of no use to a run now; empty when it is."""


def any_slot(_: DeviceSlot) -> str:
    """Nothing against it."""
    return ""


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
        """As a table shows it: `GPU 0,1`."""
        kind = self.slots[0].name.split()[0]
        numbers = ",".join(slot.name.removeprefix(kind).strip() for slot in self.slots)
        return f"{kind} {numbers}".strip()

    def environment(self, num_processes: int = 1) -> dict[str, str]:
        """What the run's processes need to see these devices and no others."""
        if not self.slots[0].is_gpu:
            return _threads(len(self.cores()) // num_processes)
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(slot.device for slot in self.slots),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }

    def cores(self) -> set[int]:
        """Cores its processes are held to; empty for all."""
        return {core for slot in self.slots for core in slot.cores}

    def uses(self, slot: DeviceSlot) -> bool:
        """Whether some of the memory of a slot is this run's: the machine's own, every run has."""
        return not slot.is_gpu or any(own.device == slot.device for own in self.slots)

    def release(self) -> None:
        """Close this process's hold; a worker that still lives keeps its own."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def _threads(cores: int) -> dict[str, str]:
    """Threads for each process, unless the user has said how many; none where all may be used."""
    return {"OMP_NUM_THREADS": str(cores)} if cores and "OMP_NUM_THREADS" not in os.environ else {}


def occupied(device: str) -> str:
    """Why a GPU cannot be used now: somebody who takes no leases computes on it.

    So does a run of ours that has ended, for as long as the driver takes to free its memory.
    """
    if not device.startswith(("GPU-", "MIG-")):
        return ""
    found = processes_on(device)
    return f"used by process {found[0]}" if found else ""


@dataclass
class Devices:
    """All devices of one kind that this pool may use."""

    slots: Sequence[DeviceSlot]
    busy: Busy = occupied
    shared: bool = False
    """Whether runs share devices."""
    _gathered: dict[DeviceSlot, int] = field(default_factory=dict)
    _gathering: int | None = None
    why: str = ""
    """Why the last request was not granted, for the user."""

    @property
    def count(self) -> int:
        """Different devices."""
        return len({slot.device for slot in self.slots})

    def threads(self) -> dict[str, str]:
        """Variables of every process that has one CPU slot; none where it may use all cores."""
        return _threads(len(self.slots[0].cores))

    def take(self, count: int, *, gather: bool = False, suits: Suits = any_slot) -> Grant | None:
        """Lease so many different devices, or none.

        Args:
            count: how many.
            gather: keep what is free until there are enough; ask again to have them. One pool at a
                time may do that.
            suits: whether a slot will do.
        """
        if not gather:
            self.let_go()
        self.why = ""
        taken = self._gathered if gather else {}
        may_keep = gather and self._may_gather()
        for slot in self.slots:
            if len(taken) == count:
                break
            if slot.device in {other.device for other in taken}:
                continue
            if (descriptor := self._lease(slot, suits)) is not None:
                taken[slot] = descriptor
        if len(taken) < count:
            if not may_keep:
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

    def _may_gather(self) -> bool:
        if self._gathering is None:
            self._gathering = try_lease(GATHERING)
        return self._gathering is not None

    def _lease(self, slot: DeviceSlot, suits: Suits) -> int | None:
        descriptor = try_lease(slot.lease)
        if descriptor is None:
            self.why = f"{slot.name} is leased by {holder_of(slot.lease)}"
            return None
        if not self.shared and (why := self.busy(slot.device)):
            self.why = f"{slot.name} is {why}"
        elif why := suits(slot):
            self.why = f"{slot.name}: {why}"
        else:
            return descriptor
        os.close(descriptor)
        return None


def _close(taken: dict[DeviceSlot, int]) -> None:
    for descriptor in taken.values():
        os.close(descriptor)
    taken.clear()


def find_devices(kind: str, num_cpu_slots: int, runs_per_device: int) -> Devices:
    """The devices of this machine a pool may use.

    Args:
        kind: `cuda` or `cpu`.
        num_cpu_slots: runs at once on a CPU.
        runs_per_device: runs that may share a GPU.
    """
    if kind == "cuda":
        return Devices(gpu_slots(runs_per_device), shared=runs_per_device > 1)
    return Devices(cpu_slots(num_cpu_slots), shared=num_cpu_slots > 1)
