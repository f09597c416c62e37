"""Launcher `local`: runs on this machine. Small runs fill gaps, large ones get devices kept."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from eke.common.errors import BusyError, ConfigError, EkeError
from eke.common.paths import SHARED_DEVICE, RunPaths, SweepPaths
from eke.common.process_env import num_allocated_nodes
from eke.common.text import format_bytes
from eke.config.schema import Config
from eke.estimate.memory import known_forecast, least_bytes, least_host_bytes
from eke.hardware import DeviceSlot, choose_device, free_bytes, resident_bytes
from eke.launch.devices import DeviceLease, Devices, find_devices
from eke.launch.interface import Launcher, PlannedDevice, StartedSweep
from eke.launch.processes.run_attempt import Probed, RunAttempt, probe
from eke.launch.processes.sweep import Job
from eke.launch.processes.sweep_scheduler import SweepState
from eke.launch.processes.worker_process import Worker, forward_signals
from eke.plan.planner import Plan
from eke.plan.record import Outcome
from eke.tuning.check_memory_fit import cannot_fit, reject_unfit_plan

MAX_QUEUE_JUMPS = 8
"""Runs that may start before one that waits for more devices. Then free devices are kept for it."""


@dataclass
class FreeMemory:
    """Free memory of each device for one run, read again at each attempt to start the run."""

    plan: Plan
    running: Sequence[Job]
    free: Callable[[DeviceSlot], int | None] = free_bytes
    resident: Callable[[int], int] = resident_bytes
    by_others: dict[str, Plan] = field(default_factory=dict)
    """Plan with its free memory, for each device on which other processes hold too much."""

    def lacks(self, slot: DeviceSlot) -> str:
        """Return why a slot's device has too little memory, "" if it has enough or is unknown."""
        left = self.left(slot)
        if left is None:
            return ""
        plan = replace(self.plan, device=replace(self.plan.device, available_bytes=left))
        found = known_forecast(plan)
        if not cannot_fit(plan, found):
            return ""
        if not self._beside(slot):
            self.by_others[slot.device] = plan
        least = least_bytes(plan, found)
        return f"{format_bytes(left)} of memory free, at least {format_bytes(least)} needed"

    def problem(self, num_spare: int) -> ConfigError | None:
        """Return the error of a run if other processes hold memory on too many devices."""
        if len(self.by_others) <= num_spare:
            return None
        plan = next(iter(self.by_others.values()))
        try:
            reject_unfit_plan(plan, known_forecast(plan))
        except ConfigError as error:
            return error
        return None

    def left(self, slot: DeviceSlot) -> int | None:
        """Return the total memory minus other processes' memory and other runs' needs."""
        whole, free = self.plan.device.memory_bytes, self.free(slot)
        if whole is None or free is None:
            return None
        held = needed = 0
        for job in self._beside(slot):  # a run may not have reached its first step
            found = known_forecast(job.plan)
            of_gpu = slot.is_gpu  # the driver's process ids are unknown in a container
            least = least_bytes(job.plan, found) if of_gpu else least_host_bytes(job.plan, found)
            own = least if of_gpu else self.resident(job.pid)
            held, needed = held + own, needed + max(own, least)
        return max(0, whole - max(0, whole - free - held) - needed)

    def _beside(self, slot: DeviceSlot) -> list[Job]:
        return [job for job in self.running if job.grant is not None and job.grant.uses(slot)]


def _start_run(plan: Plan, paths: RunPaths, grant: DeviceLease) -> RunAttempt:
    """Start a run on its devices. Errors as in `RunAttempt`."""
    size, cores = plan.batch.world_size, grant.cores()
    environment = grant.environment(size) | ({SHARED_DEVICE: "1"} if grant.shared else {})
    before = os.sched_getaffinity(0) if cores else set[int]()
    try:
        if cores:  # inherited by the worker, without code between fork and exec
            os.sched_setaffinity(0, cores)
        start = partial(Worker, paths, size, environment)
        return RunAttempt(plan, paths, size, lambda lock: start([lock, *grant.descriptors]))
    finally:
        if cores:
            os.sched_setaffinity(0, before)


POLL_S = 0.02
"""Poll interval for the workers, in seconds. It delays the start of the next run."""

_RETRY_S = 0.5
"""Retry interval for devices that other processes hold, in seconds."""

_BUSY_S = 2.0
"""Retry interval for a run that another process holds, in seconds."""


@dataclass
class Pool(StartedSweep):
    """Runs of a sweep and the devices they share. The runs end with this process."""

    books: SweepState
    devices: Mapping[str, Devices]
    """Devices by kind (`cuda`, `cpu`)."""
    start: Callable[[Plan, RunPaths, DeviceLease], RunAttempt] = _start_run
    heard: list[int] = field(default_factory=list)
    """Stop signals received so far."""
    room: Callable[[Plan, Sequence[Job]], FreeMemory] = FreeMemory
    """Creates the memory check of a run at its start."""
    _tried: float = 0.0

    def wait(self) -> bool:
        """Run all jobs to their end, or until a stop signal. No worker is left afterwards."""
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
                devices.release_all()
            self.books.ledger.flush(at_once=True)
        return bool(self.heard)

    def step(self) -> None:
        """Collect the workers that have ended, and start the jobs that can start."""
        ended = [job for job in self.books.running() if job.live.is_over()]
        for job in ended:
            self.collect(job)
        now = time.monotonic()
        if not self.heard and (ended or now - self._tried >= _RETRY_S):
            self._tried = now
            self.start_what_fits([j for j in self.books.jobs if j.is_waiting()], now)
        if self.heard:  # waiting jobs are not started any more
            for job in self.books.jobs:
                job.waiting_for = ""
        self.books.ledger.flush()
        self.books.board.update(self.books.jobs)

    def ask(self, number: int) -> None:
        """Forward a signal to every worker."""
        for job in self.books.running():
            job.live.ask(number)

    def kill(self) -> None:
        """Kill every worker."""
        for job in self.books.running():
            job.live.kill()

    def start_what_fits(self, waiting: Sequence[Job], now: float) -> None:
        """Start the jobs that can start, in order."""
        passed_over: list[Job] = []
        too_many: dict[str, int] = {}
        for job in waiting:
            if now < job.not_before:
                continue
            starves = job.overtaken >= MAX_QUEUE_JUMPS
            # A request that failed for one job also fails for later jobs of at least its size.
            fits = job.num_devices < too_many.get(job.kind, job.num_devices + 1)
            if not fits or not self.try_to_start(job, gather=starves):
                passed_over.append(job)
                wanted = 0 if starves else job.num_devices
                too_many[job.kind] = min(wanted, too_many.get(job.kind, wanted))
                continue
            for other in passed_over:
                other.overtaken += other.kind == job.kind

    def try_to_start(self, job: Job, gather: bool) -> bool:
        """Start a job or set its outcome. Return False if its devices are not available."""
        devices = self.devices[job.kind]
        count = devices.needed(job.plan)
        if count > devices.count:
            reason = f"needs {count} devices, {devices.count} available"
            self.books.end(job, Outcome.refused, reason)
            return True
        room = self.room(job.plan, self.books.running())
        try:
            grant = devices.take(count, gather=gather, suits=room.lacks)
        except EkeError as error:
            if not self.books.running():
                raise
            job.waiting_for = str(error)  # tried again until the running jobs have ended
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

    def launch(self, job: Job, grant: DeviceLease) -> None:
        """Start a job on its devices, unless another process has run it or runs it."""
        try:
            place = self.books.place_of(job.plan)
            if self.books.answer(job, place):
                return
            live = self.start(job.plan, place.paths, grant)
            job.live, job.pid = live, live.pid
        except BusyError as error:
            job.not_before = time.monotonic() + _BUSY_S
            job.waiting_for = str(error)
        except EkeError as error:
            self.books.fail(job, error)
        else:
            job.grant, job.where = grant, grant.name
            self.books.started(job)

    def collect(self, job: Job) -> None:
        """Read the record of a worker that has ended, and release its devices."""
        grant = job.grant
        assert grant is not None
        try:
            self.books.settle(job, job.live.finish(), stopping=bool(self.heard))
        except EkeError as error:
            job.end(Outcome.crashed, error.short())
        except Exception as error:  # the other runs continue
            why = f"the run's files cannot be read: {type(error).__name__}: {error}"
            job.end(Outcome.crashed, why)
        finally:
            job.grant = None
            grant.release()
        self.books.left(job)


def probe_in_pool(plan: Plan) -> Probed:
    """Run the trial of a plan on free devices. Errors as in `probe`."""
    devices = find_devices(plan)
    grant = devices.take(plan.batch.world_size * plan.batch.devices)
    if grant is None:
        return Probed(None, devices.why or "too few devices")
    try:
        return probe(plan, lambda trial, paths: _start_run(trial, paths, grant))
    finally:
        grant.release()


class LocalLauncher(Launcher):
    """Starts runs on the devices of this machine."""

    name = "local"
    unused_keys = ("prefix",)

    def target(self, config: Config) -> PlannedDevice:
        """Return the device of this machine, or the device that `hardware` declares."""
        return PlannedDevice(*choose_device(config.hardware.option), num_allocated_nodes())

    def start(self, books: SweepState, paths: SweepPaths, sweep: str) -> Pool:
        """Return the pool of this machine's devices. Its runs start in `wait`."""
        plans = {job.kind: job.plan for job in books.jobs}
        return Pool(books, {kind: find_devices(plan) for kind, plan in plans.items()})
