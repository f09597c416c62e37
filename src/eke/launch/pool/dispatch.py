"""The loop of a pool: start what fits, see what ended, until every run of a sweep is done.

One process watches over all workers; torch is never imported here.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from eke.errors import BusyError, EkeError
from eke.launch.folder import Place
from eke.launch.live import place_of
from eke.launch.pool.devices import Devices, Grant
from eke.launch.pool.dominance import needs_at_least
from eke.launch.pool.job import Job, Running
from eke.launch.pool.order import start_what_fits
from eke.launch.pool.start import start_run
from eke.launch.supervise import forward_signals
from eke.plan import Plan
from eke.record import Outcome

POLL_S = 0.02
"""Between two looks at the workers: what a run that has ended may wait for the next one."""

RETRY_S = 0.5
"""Between two tries to get devices that others hold."""

BUSY_S = 2.0
"""Between two tries at a run that somebody else works on."""

Start = Callable[[Plan, Place, Grant], Running]


class Board(Protocol):
    """Where a sweep is shown."""

    def started(self, job: Job) -> None:
        """A run has been started."""
        ...

    def ended(self, job: Job) -> None:
        """A run is done with, for now at least."""
        ...

    def update(self, jobs: Sequence[Job]) -> None:
        """Time has passed."""
        ...


class Ledger(Protocol):
    """Where the sweep is written down."""

    def note(self, job: Job) -> None:
        """A run has changed."""
        ...

    def flush(self, at_once: bool = False) -> None:
        """Write what has changed."""
        ...


@dataclass
class Pool:
    """Runs, and the devices they share."""

    jobs: Sequence[Job]
    devices: Mapping[str, Devices]
    """By kind."""
    board: Board
    ledger: Ledger
    start: Start = start_run
    place_of: Callable[[Plan], Place] = place_of
    heard: list[int] = field(default_factory=list)
    """Signals that ask to stop."""
    _tried: float = 0.0

    def run(self) -> None:
        """Run every job to its end, or until asked to stop; afterwards no worker is left."""
        try:
            with forward_signals(self.ask, self.kill) as self.heard:
                self.ledger.flush(at_once=True)
                self.answer_from_records()
                while self.is_going_on():
                    self.step()
                    time.sleep(POLL_S)
        finally:
            for job in self.running():
                self.collect(job)
            for devices in self.devices.values():
                devices.let_go()
            self.ledger.flush(at_once=True)

    def is_going_on(self) -> bool:
        """Whether there is anything to wait for."""
        if self.heard:
            return bool(self.running())
        return any(job.outcome is None for job in self.jobs)

    def step(self) -> None:
        """Look at every worker, and start what can be started."""
        ended = [job for job in self.running() if job.live and job.live.is_over()]
        for job in ended:
            self.collect(job)
        now = time.monotonic()
        if not self.heard and (ended or now - self._tried >= RETRY_S):
            self._tried = now
            start_what_fits([job for job in self.jobs if job.is_due()], self.try_to_start)
        self.ledger.flush()
        self.board.update(self.jobs)

    def running(self) -> list[Job]:
        """Jobs with a worker."""
        return [job for job in self.jobs if job.live is not None]

    def ask(self, number: int) -> None:
        """Hand a signal on to every worker."""
        for job in self.running():
            if job.live:
                job.live.ask(number)

    def kill(self) -> None:
        """End every worker."""
        for job in self.running():
            if job.live:
                job.live.kill()

    def answer_from_records(self) -> None:
        """Settle, before anything starts, what earlier runs have answered."""
        for job in self.jobs:
            try:
                self.answer(job, self.place_of(job.plan))
            except EkeError as error:
                self.end(job, Outcome.crashed, str(error))

    def answer(self, job: Job, place: Place) -> bool:
        """Settle a job from a final record, if there is one."""
        job.folder = str(place.paths.folder)
        if place.record is None:
            return False
        job.reused = job.live is None and not job.tries
        job.record = place.record
        failure = place.record.failure
        self.end(job, Outcome[place.record.outcome], failure.message if failure else "")
        return True

    def try_to_start(self, job: Job, gather: bool) -> bool:
        """Start a job, or settle it otherwise; False when its devices cannot be had now."""
        devices = self.devices[job.kind]
        count = min(job.num_devices, devices.count) if job.kind == "cpu" else job.num_devices
        if count > devices.count:
            reason = f"needs {count} devices, and there are {devices.count}"
            self.end(job, Outcome.refused, reason)
            return True
        grant = devices.take(count, gather=gather)
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
        """Start a job on its devices, unless somebody else has done or does it."""
        try:
            place = self.place_of(job.plan)
            if self.answer(job, place):
                return
            job.live = self.start(job.plan, place, grant)
        except BusyError as error:
            job.not_before = time.monotonic() + BUSY_S
            job.waiting_for = str(error)
        except EkeError as error:
            self.end(job, Outcome.crashed, str(error))
        else:
            job.grant, job.started, job.waiting_for = grant, time.monotonic(), ""
            self.board.started(job)
            self.ledger.note(job)

    def collect(self, job: Job) -> None:
        """Take the record of a worker that has ended, and free its devices."""
        live, grant = job.live, job.grant
        assert live is not None
        assert grant is not None
        try:
            record = live.finish()
        except EkeError as error:
            self.end(job, Outcome.crashed, str(error))
        else:
            again = job.settle(record) and not self.heard
            if self.heard and job.outcome is None:
                job.end(Outcome[record.outcome], record.failure.message if record.failure else "")
            if not again:
                self.skip_what_needs_more(job)
        finally:
            job.live = job.grant = None
            job.lasted_s += time.monotonic() - job.started
            grant.release()
        self.board.ended(job)
        self.ledger.note(job)

    def end(self, job: Job, outcome: Outcome, reason: str) -> None:
        """Settle a job that has no worker."""
        job.end(outcome, reason)
        self.skip_what_needs_more(job)
        self.board.ended(job)
        self.ledger.note(job)

    def skip_what_needs_more(self, job: Job) -> None:
        """Leave out the jobs that can only need more memory than one that ran out of it."""
        # Beside others on one device, memory may have run out because of them.
        if job.outcome is not Outcome.oom or (job.record and job.record.shared_device):
            return
        for other in self.jobs:
            if other.is_waiting() and (why := needs_at_least(other.plan, job.plan)):
                self.end(other, Outcome.skipped, f"{job.plan.run_id} ran out of memory, and {why}")
