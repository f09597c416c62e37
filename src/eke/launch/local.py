"""Launcher `local`: runs of a sweep on this machine, which one process starts and supervises.

First come first served: small runs fill gaps; devices are kept for a large one as they get free.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from eke.common.errors import BusyError, ConfigError, EkeError
from eke.common.paths import SHARED_DEVICE, RunPaths, SweepPaths
from eke.common.process_env import machines_at_hand
from eke.common.text import format_bytes
from eke.config.schema import Config
from eke.estimate.memory import known_forecast, least_bytes, least_host_bytes
from eke.hardware import DeviceSlot, choose_device, free_bytes, resident_bytes
from eke.launch.devices import Devices, Grant, find_devices
from eke.launch.interface import Launcher, StartedSweep, Target
from eke.launch.processes.running_run import LiveRun, Probed, probe
from eke.launch.processes.sweep import Job
from eke.launch.processes.sweep_state import Books
from eke.launch.processes.worker_process import forward_signals
from eke.plan.planner import Plan
from eke.plan.record import Outcome
from eke.tuning.refuse_oom import cannot_fit, refuse_what_cannot_fit

MAX_OVERTAKEN = 8
"""Runs that may be started before one that waits for more devices than are free; then what gets
free is kept for it."""


@dataclass
class FreeMemory:
    """Free memory of each device for one run; re-read at each attempt to start it."""

    plan: Plan
    running: Sequence[Job]
    """Runs of the same sweep."""
    free: Callable[[DeviceSlot], int | None] = free_bytes
    resident: Callable[[int], int] = resident_bytes
    by_others: dict[str, Plan] = field(default_factory=dict)
    """Device without enough memory, used by no run of this sweep -> the plan for what is free."""

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
        """Message for a run that does not fit because others hold memory on too many devices."""
        if len(self.by_others) <= num_spare:
            return None
        plan = next(iter(self.by_others.values()))
        try:
            refuse_what_cannot_fit(plan, known_forecast(plan))
        except ConfigError as error:
            return error
        return None

    def left(self, slot: DeviceSlot) -> int | None:
        """Bytes for this run: total minus what others hold and concurrent runs need."""
        whole, free = self.plan.device.memory_bytes, self.free(slot)
        if whole is None or free is None:
            return None
        held = needed = 0
        for job in self._beside(slot):  # one may not have come to its first step
            found = known_forecast(job.plan)
            of_gpu = slot.is_gpu  # a container does not know the driver's process ids
            least = least_bytes(job.plan, found) if of_gpu else least_host_bytes(job.plan, found)
            own = least if of_gpu else self.resident(job.pid)
            held, needed = held + own, needed + max(own, least)
        return max(0, whole - max(0, whole - free - held) - needed)

    def _beside(self, slot: DeviceSlot) -> list[Job]:
        return [job for job in self.running if job.grant is not None and job.grant.uses(slot)]


def start_run(plan: Plan, paths: RunPaths, grant: Grant) -> LiveRun:
    """Start a run on its devices; errors as of `LiveRun`."""
    size, cores = plan.batch.world_size, grant.cores()
    environment = grant.environment(size) | ({SHARED_DEVICE: "1"} if grant.shared else {})
    before = os.sched_getaffinity(0) if cores else set[int]()
    try:
        if cores:  # the kernel hands them on, so no code runs between fork and exec
            os.sched_setaffinity(0, cores)
        return LiveRun(plan, paths, size, environment, grant.descriptors)
    finally:
        if cores:
            os.sched_setaffinity(0, before)


POLL_S = 0.02
"""Between two looks at the workers: what a run that has ended may wait for the next one."""

RETRY_S = 0.5
"""Between two tries to get devices that others hold."""

BUSY_S = 2.0
"""Retry interval for a run that another process works on."""


@dataclass
class Pool(StartedSweep):
    """Runs of a sweep, and the devices they share; it ends with this process."""

    books: Books
    devices: Mapping[str, Devices]
    """By kind."""
    start: Callable[[Plan, RunPaths, Grant], LiveRun] = start_run
    heard: list[int] = field(default_factory=list)
    """Signals that ask to stop."""
    room: Callable[[Plan, Sequence[Job]], FreeMemory] = FreeMemory
    """Checks a run's memory against what is held when it starts."""
    _tried: float = 0.0

    def wait(self) -> bool:
        """Run every job to its end, or until a stop signal; no worker is left afterwards."""
        try:
            with forward_signals(self.ask, self.kill) as self.heard:
                self.books.ledger.flush(at_once=True)
                self.books.answer_from_records()
                while self.books.running() if self.heard else self.books.unfinished():
                    self.step()
                    time.sleep(POLL_S)
        finally:
            for job in self.books.running():
                self.collect(job)
            for devices in self.devices.values():
                devices.let_go()
            self.books.ledger.flush(at_once=True)
        return bool(self.heard)

    def step(self) -> None:
        """Look at every worker, and start what can be started."""
        ended = [job for job in self.books.running() if job.live.is_over()]
        for job in ended:
            self.collect(job)
        now = time.monotonic()
        if not self.heard and (ended or now - self._tried >= RETRY_S):
            self._tried = now
            self.start_what_fits([j for j in self.books.jobs if j.is_waiting()], now)
        if self.heard:  # a job that cannot start does not wait: this process may hold its devices
            for job in self.books.jobs:
                job.waiting_for = ""
        self.books.ledger.flush()
        self.books.board.update(self.books.jobs)

    def ask(self, number: int) -> None:
        """Hand a signal on to every worker."""
        for job in self.books.running():
            job.live.ask(number)

    def kill(self) -> None:
        """End every worker."""
        for job in self.books.running():
            job.live.kill()

    def start_what_fits(self, waiting: Sequence[Job], now: float) -> None:
        """Start every job that can be started, in order."""
        passed_over: list[Job] = []
        too_many: dict[str, int] = {}
        for job in waiting:
            if now < job.not_before:
                continue
            starves = job.overtaken >= MAX_OVERTAKEN
            # What one job could not get, no later one gets that wants as much.
            fits = job.num_devices < too_many.get(job.kind, job.num_devices + 1)
            if not fits or not self.try_to_start(job, gather=starves):
                passed_over.append(job)
                wanted = 0 if starves else job.num_devices
                too_many[job.kind] = min(wanted, too_many.get(job.kind, wanted))
                continue
            for other in passed_over:
                other.overtaken += other.kind == job.kind

    def try_to_start(self, job: Job, gather: bool) -> bool:
        """Start a job, or settle it otherwise; False when its devices cannot be had now."""
        devices = self.devices[job.kind]
        count = devices.needed(job.plan)
        if count > devices.count:
            reason = f"needs {count} devices, and there are {devices.count}"
            self.books.end(job, Outcome.refused, reason)
            return True
        room = self.room(job.plan, self.books.running())
        try:
            grant = devices.take(count, gather=gather, suits=room.lacks)
        except EkeError as error:
            if not self.books.running():
                raise
            job.waiting_for = str(error)  # until running jobs have ended, whatever happens
            return False
        if grant is None and (full := room.problem(devices.count - count)):
            self.books.fail(job, full)
            return True
        if grant is None:
            job.waiting_for = devices.why
            return False
        try:
            self.launch(job, grant)
        finally:
            if job.live is None:
                grant.release()
        return True

    def launch(self, job: Job, grant: Grant) -> None:
        """Start a job on its devices, unless another process has done or does it."""
        try:
            place = self.books.place_of(job.plan)
            if self.books.answer(job, place):
                return
            live = self.start(job.plan, place.paths, grant)
            job.live, job.pid = live, live.pid
        except BusyError as error:
            job.not_before = time.monotonic() + BUSY_S
            job.waiting_for = str(error)
        except EkeError as error:
            self.books.fail(job, error)
        else:
            job.grant, job.where = grant, grant.name
            self.books.started(job)

    def collect(self, job: Job) -> None:
        """Take the record of a worker that has ended, and free its devices."""
        grant = job.grant
        assert grant is not None
        try:
            self.books.settle(job, job.live.finish(), stopping=bool(self.heard))
        except EkeError as error:
            job.end(Outcome.crashed, error.short())
        except Exception as error:  # whatever it left: the others continue
            why = f"what it left cannot be read: {type(error).__name__}: {error}"
            job.end(Outcome.crashed, why)
        finally:
            job.grant = None
            grant.release()
        self.books.left(job)


def probe_in_pool(plan: Plan) -> Probed:
    """Run the trial of a plan as its run would start, on free devices; errors as of `probe`."""
    devices = find_devices(plan)
    grant = devices.take(plan.batch.world_size * plan.batch.devices)
    if grant is None:
        return Probed(None, devices.why or "there are too few devices")
    try:
        return probe(plan, lambda trial, paths: start_run(trial, paths, grant))
    finally:
        grant.release()


class LocalLauncher(Launcher):
    """Runs on the devices of this machine."""

    name = "local"
    unused_keys = ("prefix",)

    def target(self, config: Config) -> Target:
        """The device of this machine, or the one that `hardware` declares."""
        return Target(*choose_device(config.hardware.option), machines_at_hand())

    def start(self, books: Books, paths: SweepPaths, sweep: str) -> Pool:
        """Make the pool; its runs start in `wait`."""
        plans = {job.kind: job.plan for job in books.jobs}
        return Pool(books, {kind: find_devices(plan) for kind, plan in plans.items()})
