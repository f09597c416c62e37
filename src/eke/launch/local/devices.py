"""Allocate devices to runs: whole sets at once, or one by one to a run that waits for many.

Scheduling order: first come first served, small runs fill gaps, large runs never starve.

Leases of devices: two sweeps on one machine never get the same one.

A lease is a lock (flock) on a file named after the device, shared by all users of the machine. The
kernel frees it when its last holder is gone: the pool, and the worker it was handed to. Neither a
killed pool nor a killed worker leaves a device taken; a worker that outlives its pool keeps it.

Memory check right before a run starts, against what other processes hold of its device.

A sweep is planned for idle devices, since most runs start later. Free memory is read right before
each start: the kernel may kill a process that exceeds it.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from eke.common.errors import ConfigError, EkeError
from eke.common.files import hold_folder, open_shared_lock, read_text, try_lock
from eke.common.text import format_bytes
from eke.estimate.memory import (
    cannot_fit,
    known_forecast,
    least_bytes,
    least_host_bytes,
    refuse_what_cannot_fit,
)
from eke.estimate.time import slowdown
from eke.hardware import DeviceSlot, cpu_slots, free_bytes, gpu_slots, processes_on, resident_bytes
from eke.launch.processes.sweep import Job
from eke.plan.planner import Plan

MAX_OVERTAKEN = 8
"""Runs that may be started before one that waits for more devices than are free; then what gets
free is kept for it. A number of runs and not a time: runs of a sweep last about equally long."""

Take = Callable[[Job, bool], bool]
"""Start a job if its devices can be had, and say so; the flag says to keep what is free until there
are enough."""


def start_what_fits(due: Iterable[Job], take: Take) -> list[Job]:
    """Start every job that can be started, in order; returns them."""
    started: list[Job] = []
    passed_over: list[Job] = []
    too_many: dict[str, int] = {}
    for job in due:
        # What one job could not get, no later one gets that wants as much.
        fits = job.num_devices < too_many.get(job.kind, job.num_devices + 1)
        if not fits or not take(job, starves(job)):
            passed_over.append(job)
            wanted = 0 if starves(job) else job.num_devices
            too_many[job.kind] = min(wanted, too_many.get(job.kind, wanted))
            continue
        started.append(job)
        for other in passed_over:
            other.overtaken += other.kind == job.kind
    return started


def starves(job: Job) -> bool:
    """Whether enough others have been started before it."""
    return job.overtaken >= MAX_OVERTAKEN


LEASES = "EKE_LEASES"
"""Environment variable with another folder for the locks: pools that use different ones do not see
each other."""

ELSEWHERE = f"export {LEASES}=FOLDER names another one"
"""Advice when the folder is unusable."""

ALL_USERS = Path("/tmp/eke-leases")
"""Default folder. Not in `TMPDIR`, which may differ per user, shell or job."""

SHARED_FOLDER = 0o1777
"""Anyone may create files, only the owner may delete them, as in /tmp."""


def lease_folder() -> Path:
    """This machine's lock folder; created if missing, for all users."""
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
        Its file descriptor, held until it is closed; None if another process holds it.

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
    """Description of the last holder of a lock; for display only."""
    with contextlib.suppress(OSError):
        if said := re.match(r"process \d+", read_text(lease_folder() / f"{name}.lock", 80)):
            return said[0]
    return "another process"


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
        """Display form: `GPU 0,1`."""
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
        """Whether the run uses a slot's memory; every run uses the machine's."""
        return not slot.is_gpu or any(own.device == slot.device for own in self.slots)

    def release(self) -> None:
        """Close this process's hold; a worker that still lives keeps its own."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def _threads(cores: int) -> dict[str, str]:
    """Threads for each process, unless the user set it; none if all may be used."""
    return {"OMP_NUM_THREADS": str(cores)} if cores and "OMP_NUM_THREADS" not in os.environ else {}


def occupied(device: str) -> str:
    """Why a GPU cannot be used now: a process without a lease computes on it.

    A finished run of ours also counts until the driver has freed its memory.
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

    def needed(self, job: Job) -> int:
        """Slots that a run needs at once."""
        if self.slots_per_run is not None:
            return self.slots_per_run
        return min(job.num_devices, self.count) if job.kind == "cpu" else job.num_devices

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


@dataclass
class FreeMemory:
    """Free memory of each device for one run; re-read at each attempt to start it."""

    plan: Plan
    running: Sequence[Job]
    """Runs of the same sweep."""
    free: Callable[[DeviceSlot], int | None] = free_bytes
    resident: Callable[[int], int] = resident_bytes
    by_others: dict[str, Plan] = field(default_factory=dict)
    """Device without enough memory although no run of this sweep uses it -> the plan for what is
    free."""

    def lacks(self, slot: DeviceSlot) -> str:
        """Why a slot's device has too little memory; empty if it has enough, or if unknown."""
        left = self.left(slot)
        if left is None:
            return ""
        plan = replace(self.plan, device=replace(self.plan.device, available_bytes=left))
        found = known_forecast(plan)
        if not cannot_fit(plan, found):
            return ""
        if not self._beside(slot):
            self.by_others[slot.device] = plan
        needed = format_bytes(least_bytes(plan, found))
        return f"{format_bytes(left)} of memory free now, at least {needed} needed"

    def problem(self, num_spare: int) -> ConfigError | None:
        """Message for a run that does not fit because others hold memory on too many devices.

        Args:
            num_spare: devices that it could do without.
        """
        if len(self.by_others) <= num_spare:
            return None
        plan = next(iter(self.by_others.values()))
        try:
            refuse_what_cannot_fit(plan, known_forecast(plan), slowdown)
        except ConfigError as error:
            return error
        return None

    def left(self, slot: DeviceSlot) -> int | None:
        """Bytes for this run: total minus what others hold and concurrent runs need."""
        whole, free = self.plan.device.memory_bytes, self.free(slot)
        if whole is None or free is None:
            return None
        beside = [self._held_and_needed(slot, job) for job in self._beside(slot)]
        others = max(0, whole - free - sum(held for held, _ in beside))
        return max(0, whole - others - sum(max(each) for each in beside))

    def _beside(self, slot: DeviceSlot) -> list[Job]:
        return [job for job in self.running if job.grant is not None and job.grant.uses(slot)]

    def _held_and_needed(self, slot: DeviceSlot, job: Job) -> tuple[int, int]:
        """Bytes of a run that is running, which may not have come to its first step."""
        found = known_forecast(job.plan)
        if slot.is_gpu:  # a container does not know the driver's process ids
            needed = least_bytes(job.plan, found)
            return needed, needed
        return self.resident(job.pid), least_host_bytes(job.plan, found)
