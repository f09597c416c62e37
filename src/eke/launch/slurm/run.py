"""A run in a cluster, as whoever waits for it sees it."""

from dataclasses import dataclass

from eke.launch.folder import Place, claim
from eke.launch.slurm import scheduler
from eke.launch.slurm.states import outcome_of
from eke.plan import Plan, outline_record
from eke.record import Failure, Record, metrics, read_attempts, read_record, write_record


@dataclass
class ClusterRun:
    """One run whose job is on a node."""

    plan: Plan
    place: Place
    element: str
    """SLURM's name of its job: `123_4`."""
    over: bool = False
    """Whether the job has left the queue."""
    last_state: str = ""
    """Of the job, once it is over and if anybody remembers."""

    def is_over(self) -> bool:
        """Whether its job has left the queue."""
        return self.over

    def ask(self, _: int) -> None:
        """Ask SLURM to end it: the run saves first."""
        scheduler.cancel([self.element])

    def kill(self) -> None:
        """End it; SLURM knows one way, and kills whoever has not left after KillWait."""
        scheduler.cancel([self.element])

    def finish(self) -> Record:
        """What it left; written here for a job that ended without a word.

        Raises:
            BusyError: somebody works on this run, so that it has not ended.
            EkeError: the folder cannot be read or written.
        """
        record = read_record(self.place.paths)
        if record is not None and is_newest(self.place, record):
            return record
        return record_lost(self.plan, self.place, self.last_state)


def is_newest(place: Place, record: Record) -> bool:
    """Whether a record is of the newest attempt."""
    return record.attempt >= len(read_attempts(place.paths)) - 1


def record_lost(plan: Plan, place: Place, state: str) -> Record:
    """The record of a run whose job is over and has left none; `state` is the job's last.

    Raises:
        BusyError: somebody works on this run.
        EkeError: the folder cannot be written.
    """
    paths = place.paths
    with claim(paths):
        record = read_record(paths)
        if record is not None and is_newest(place, record):
            return record
        rows, _ = metrics.read_rows(paths.metrics)
        attempt = max(0, len(read_attempts(paths)) - 1)
        told = state or "and SLURM remembers no reason"
        failure = Failure("job", f"its job is over and left no record: {told}")
        record = outline_record(plan, rows, attempt, outcome_of(state), failure)
        write_record(paths, record)
        return record
