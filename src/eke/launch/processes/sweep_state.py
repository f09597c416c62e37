"""The books of a sweep: what has become of each run, for whoever shows it or writes it down."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from eke.common.errors import ConfigError, EkeError
from eke.common.units import format_number
from eke.launch.processes.oom_skip import needs_at_least
from eke.launch.processes.progress_display import Board
from eke.launch.processes.run_dir import Place
from eke.launch.processes.running_run import place_of
from eke.launch.processes.sweep_job import Job
from eke.plan.planner import Plan
from eke.plan.record import Outcome, Record


class Ledger(Protocol):
    """Where the sweep is written down."""

    def note(self, job: Job) -> None:
        """A run has changed."""
        ...

    def flush(self, at_once: bool = False) -> None:
        """Write what has changed."""
        ...


@dataclass
class Books:
    """All runs of a sweep, wherever they run."""

    jobs: Sequence[Job]
    board: Board
    ledger: Ledger
    place_of: Callable[[Plan], Place] = place_of

    def running(self) -> list[Job]:
        """Jobs with a worker."""
        return [job for job in self.jobs if job.live is not None]

    def answer_from_records(self) -> None:
        """Settle, before anything starts, what earlier runs have answered.

        Why finished runs no longer answer is said once for all of them.
        """
        places: list[Place] = []
        for job in self.jobs:
            try:
                place = self.place_of(job.plan)
                self.answer(job, place)
            except EkeError as error:
                self.fail(job, error)
            else:
                places.append(place)
        for text in done_again(places):
            self.board.note(text)

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

    def started(self, job: Job) -> None:
        """A worker is at it."""
        job.started, job.waiting_for = time.monotonic(), ""
        self.board.started(job)
        self.ledger.note(job)

    def settle(self, job: Job, record: Record, stopping: bool = False) -> None:
        """Take note of how an attempt ended; without an outcome, the job is to be tried again.

        Args:
            job: whose attempt it was.
            record: what it left.
            stopping: nothing is tried again.
        """
        again = job.settle(record) and not stopping
        if stopping and job.outcome is None:
            job.end(Outcome[record.outcome], record.failure.message if record.failure else "")
        if not again:
            self.skip_what_needs_more(job)

    def left(self, job: Job) -> None:
        """Its worker is gone, and what it left has been settled."""
        job.live = None
        job.lasted_s += time.monotonic() - job.started
        self.board.ended(job)
        self.ledger.note(job)

    def fail(self, job: Job, error: EkeError) -> None:
        """Settle a job that cannot start: now, at least."""
        rule = error.rule if isinstance(error, ConfigError) else ""
        self.end(job, Outcome.crashed, error.short(), rule)

    def end(self, job: Job, outcome: Outcome, reason: str, rule: str = "") -> None:
        """Settle a job that has no worker."""
        job.end(outcome, reason, rule)
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


def done_again(places: Sequence[Place]) -> list[str]:
    """Which finished runs do not answer any more, and why: one line for each reason."""
    reasons = Counter("; ".join(place.outdated) for place in places if place.outdated)
    return [
        f"done again, beside the record: {format_number(count, 'finished run')} ({what}); "
        "eke report has both"
        for what, count in reasons.items()
    ]
