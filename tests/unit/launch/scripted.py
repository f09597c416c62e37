"""Records, a board and a ledger for jobs whose runs are scripted."""

from pathlib import Path

from unit.plan.record.samples import bare_record

from eke.common.paths import RunPaths
from eke.launch.processes.sweep import Job
from eke.launch.slurm.dispatch import Cluster
from eke.plan.record import Outcome, Record, start_attempt, write_record


def record_for(job_id: str, outcome: str, steps: int = 0) -> Record:
    """A record with just that in it."""
    record = bare_record()
    record.run_id, record.outcome, record.steps_done = job_id, outcome, steps
    record.exit_code = Outcome[outcome].exit_code
    return record


def leave(job: Job, outcome: str, steps: int = 0, attempt: int = 0) -> None:
    """What a worker writes at its end."""
    start_attempt(RunPaths(Path(job.folder)), {})
    record = record_for(job.plan.run_id, outcome, steps)
    record.attempt = attempt
    write_record(RunPaths(Path(job.folder)), record)


def look(made: Cluster, times: int = 1) -> None:
    """So many questions to the scheduler."""
    for _ in range(times):
        made.look()


class QuietBoard:
    """Shows nothing, remembers ends and what concerns all runs."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.notes: list[str] = []

    def started(self, job: Job) -> None:
        """Nothing."""

    def ended(self, job: Job) -> None:
        """Remember."""
        self.ends.append(job.number)

    def update(self, jobs) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Remember."""
        self.notes.append(text)


class QuietLedger:
    """Writes nothing, counts."""

    def __init__(self) -> None:
        self.notes = 0

    def note(self, job: Job) -> None:
        """Count."""
        self.notes += 1

    def flush(self, at_once: bool = False) -> None:
        """Nothing."""
