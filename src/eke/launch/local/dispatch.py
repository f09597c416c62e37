"""Runs of a sweep on this machine: one process starts them on its devices and supervises them."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from eke.common.errors import BusyError, EkeError
from eke.common.paths import SHARED_DEVICE, SweepPaths
from eke.common.process_env import machines_at_hand
from eke.config.schema import Config
from eke.hardware import choose_device
from eke.launch.interface import Launcher, StartedSweep, Target
from eke.launch.local.devices import Devices, FreeMemory, Grant, find_devices, start_what_fits
from eke.launch.processes.run_dir import Place
from eke.launch.processes.running_run import LiveRun, Probed, probe
from eke.launch.processes.sweep import Job
from eke.launch.processes.sweep_state import Books
from eke.launch.processes.worker_process import forward_signals
from eke.plan.planner import Plan
from eke.plan.record import Outcome


def start_run(plan: Plan, place: Place, grant: Grant) -> LiveRun:
    """Start a run on its devices.

    Raises:
        BusyError: another process works on this run.
        RunError: the folder cannot be written.
    """
    size, cores = plan.batch.world_size, grant.cores()
    environment = grant.environment(size)
    if grant.shared:
        environment[SHARED_DEVICE] = "1"
    before = os.sched_getaffinity(0) if cores else set[int]()
    try:
        if cores:  # the kernel hands them on, so no code runs between fork and exec
            os.sched_setaffinity(0, cores)
        return LiveRun(plan, place, size, environment, grant.descriptors)
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
    start: Callable[[Plan, Place, Grant], LiveRun] = start_run
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
                while self.is_going_on():
                    self.step()
                    time.sleep(POLL_S)
        finally:
            for job in self.books.running():
                self.collect(job)
            for devices in self.devices.values():
                devices.let_go()
            self.books.ledger.flush(at_once=True)
        return bool(self.heard)

    def is_going_on(self) -> bool:
        """Whether there is anything to wait for."""
        if self.heard:
            return bool(self.books.running())
        return any(job.outcome is None for job in self.books.jobs)

    def step(self) -> None:
        """Look at every worker, and start what can be started."""
        ended = [job for job in self.books.running() if job.live and job.live.is_over()]
        for job in ended:
            self.collect(job)
        now = time.monotonic()
        if not self.heard and (ended or now - self._tried >= RETRY_S):
            self._tried = now
            start_what_fits([job for job in self.books.jobs if job.is_due()], self.try_to_start)
        if self.heard:  # a job that cannot start does not wait: this process may hold its devices
            for job in self.books.jobs:
                job.waiting_for = ""
        self.books.ledger.flush()
        self.books.board.update(self.books.jobs)

    def ask(self, number: int) -> None:
        """Hand a signal on to every worker."""
        for job in self.books.running():
            if job.live:
                job.live.ask(number)

    def kill(self) -> None:
        """End every worker."""
        for job in self.books.running():
            if job.live:
                job.live.kill()

    def try_to_start(self, job: Job, gather: bool) -> bool:
        """Start a job, or settle it otherwise; False when its devices cannot be had now."""
        devices = self.devices[job.kind]
        count = devices.needed(job)
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
            live = self.start(job.plan, place, grant)
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
        live, grant = job.live, job.grant
        assert live is not None
        assert grant is not None
        try:
            self.books.settle(job, live.finish(), stopping=bool(self.heard))
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
    """Run the trial of a plan as its run would be started, if its devices are free now.

    Raises:
        KeyboardInterrupt: a signal asked to stop; no process is left.
        RunError: the folder for temporary files cannot be written.
    """
    devices = devices_for(plan)
    grant = devices.take(plan.batch.world_size * plan.batch.devices)
    if grant is None:
        return Probed(None, devices.why or "there are too few devices")
    try:
        return probe(plan, lambda trial, place: start_run(trial, place, grant))
    finally:
        grant.release()


def devices_for(plan: Plan) -> Devices:
    """This machine's devices that a run may use, shared as its configuration says."""
    launcher = plan.config.launcher
    return find_devices(plan.device.kind, launcher.cpu_slots, launcher.runs_per_device)


class LocalLauncher(Launcher):
    """Runs on the devices of this machine."""

    name = "local"

    def unused(self, overrides: Sequence[str]) -> list[str]:
        """Warnings about overrides that other launchers read."""
        return super().unused(overrides) + [
            f"{text} has no effect with hydra/launcher=local"
            for text in overrides
            if text.startswith("launcher.prefix=")
        ]

    def target(self, config: Config) -> Target:
        """The device of this machine, or the one that `hardware` declares."""
        return Target(*choose_device(config.hardware.option), machines_at_hand())

    def start(self, books: Books, paths: SweepPaths, sweep: str) -> Pool:
        """Make the pool; its runs start in `wait`."""
        plans = {job.kind: job.plan for job in books.jobs}
        return Pool(books, {kind: devices_for(plan) for kind, plan in plans.items()})
