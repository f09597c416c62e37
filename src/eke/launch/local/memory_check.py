"""Whether a run has room beside what is held of its device's memory when it is to start.

A sweep is planned for devices that nobody else uses, since the turn of most runs comes later. Right
before a run starts it is asked what others have left: the kernel may end what takes more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from eke.common.errors import ConfigError
from eke.common.units import format_bytes
from eke.estimate.memory import (
    cannot_fit,
    known_forecast,
    least_bytes,
    least_host_bytes,
    refuse_what_cannot_fit,
)
from eke.estimate.time import slowdown
from eke.hardware import DeviceSlot, free_bytes, resident_bytes
from eke.launch.processes.sweep_job import Job
from eke.plan.planner import Plan


@dataclass
class Room:
    """What is left of each device for one run; asked anew each time it could be started."""

    plan: Plan
    running: Sequence[Job]
    """Runs of the same sweep."""
    free: Callable[[DeviceSlot], int | None] = free_bytes
    resident: Callable[[int], int] = resident_bytes
    by_others: dict[str, Plan] = field(default_factory=dict)
    """Device that has no room even though no run of this sweep uses it -> the plan for what is left
    there."""

    def lacks(self, slot: DeviceSlot) -> str:
        """Why there is no room on a slot's device; empty where there is, or nobody can tell."""
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
        """What is told of a run that does not fit beside what others hold of too many devices.

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
        """Bytes for this run: less what others hold, and what runs beside it hold or need yet."""
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
