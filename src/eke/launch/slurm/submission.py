"""The ledger of a submission: written before sbatch is called, completed when it has answered.

A kill between the two leaves an intent, which each of its runs names: whoever comes next, of this
sweep or another, asks SLURM for a job of that name before submitting any of them again. Nothing
here is pickled; a job's input is a path.
"""

import contextlib
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from eke.common.errors import EkeError
from eke.common.files import read_json, write_json
from eke.common.paths import RunPaths
from eke.launch.processes.sweep_job import are_in_vain
from eke.plan.record import RECORD_LIMIT

SUBMISSION_VERSION = 1


@dataclass(frozen=True)
class Submission:
    """One array: which element is which run."""

    name: str
    """Of the job: unlike any other."""
    runs: tuple[str, ...]
    """Run folders, by element of the array; absolute."""
    max_restarts: int
    """Times a run may be put back into the queue without a step more than before."""
    created: float
    """time.time() before sbatch was called."""
    job_id: str = ""
    """SLURM's; empty while nobody knows whether sbatch has taken it."""

    def element(self, number: int) -> str:
        """SLURM's name of one element: `123_4`."""
        return f"{self.job_id}_{number}"


@dataclass(frozen=True)
class Ticket:
    """What a run folder says of its newest job, or of the one that is being submitted."""

    submission: str
    """The submission's file."""
    element: int
    stalled: int = 0
    """Restarts since a step was made that had not been made before."""
    worths: list[Sequence[float]] = field(default_factory=list)
    """Of its attempts that were interrupted: see `eke.launch.processes.sweep_job.worth_of`."""

    def spent(self, max_restarts: int) -> str:
        """Why it is not put back into the queue once more; empty where it is."""
        if self.stalled > max_restarts:
            return f"{self.stalled} times without a step more"
        return are_in_vain(self.worths, max_restarts)


def new_submission(sweep: str, runs: list[str], max_restarts: int) -> Submission:
    """A submission with a name of its own.

    Args:
        sweep: the sweep's identity.
        runs: run folders.
        max_restarts: see Submission.
    """
    name = f"eke-{sweep}-{secrets.token_hex(4)}"
    return Submission(name, tuple(runs), max_restarts, time.time())


def submission_file(folder: Path, submission: Submission) -> Path:
    """Where it is kept: in the sweep's folder."""
    return folder / f"{submission.name}.json"


def job_log(folder: Path, element: str) -> Path:
    """What a job printed itself: whatever came before its worker, and what became of that.

    Args:
        folder: of its submission.
        element: SLURM's name of it, `123_4`; `%A_%a` in a batch script.
    """
    return folder / f"{element}.log"


def write_submission(path: Path, submission: Submission) -> None:
    """Write it atomically."""
    write_json(path, {"schema_version": SUBMISSION_VERSION, **asdict(submission)})


def read_submission(path: Path) -> Submission:
    """Read one back.

    Raises:
        EkeError: it cannot be read, or is of another version.
    """
    try:
        content: dict[str, Any] = dict(read_json(path))
        version = content.pop("schema_version", None)
        if version != SUBMISSION_VERSION:
            raise EkeError(f"{path}: version {version}, this eke reads {SUBMISSION_VERSION}")
        return Submission(**{**content, "runs": tuple(content["runs"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EkeError(f"{path}: not a readable submission ({error})") from error


def read_submissions(folder: Path) -> Iterator[tuple[Path, Submission]]:
    """All of a folder, oldest first.

    Raises:
        EkeError: one cannot be read.
    """
    found = [(path, read_submission(path)) for path in folder.glob("eke-*.json")]
    yield from sorted(found, key=lambda each: each[1].created)


def with_job(path: Path, submission: Submission, job_id: str) -> Submission:
    """Note what SLURM calls it."""
    known = replace(submission, job_id=job_id)
    write_submission(path, known)
    return known


def name_in_runs(path: Path, submission: Submission) -> dict[RunPaths, Ticket | None]:
    """Have each of its runs name an intent: no other sweep may submit them meanwhile.

    Returns:
        What they named before, for `put_back`.
    """
    before: dict[RunPaths, Ticket | None] = {}
    for number, run in enumerate(submission.runs):
        paths = RunPaths(Path(run))
        earlier = read_ticket(paths)
        with contextlib.suppress(FileNotFoundError):  # somebody has deleted the run meanwhile
            write_ticket(paths, Ticket(str(path), number))
            before[paths] = earlier
    return before


def put_back(tickets: Mapping[RunPaths, Ticket | None]) -> None:
    """Have runs name again what they named before an intent that has come to nothing."""
    for paths, ticket in tickets.items():
        with contextlib.suppress(FileNotFoundError):
            if ticket:
                write_ticket(paths, ticket)
            else:
                paths.ticket.unlink()


def write_ticket(paths: RunPaths, ticket: Ticket) -> None:
    """Note a run's newest job in its folder."""
    write_json(paths.ticket, asdict(ticket))


def read_ticket(paths: RunPaths) -> Ticket | None:
    """A run's newest job; None where there is none, or nobody can read it any more."""
    try:
        ticket = Ticket(**read_json(paths.ticket, RECORD_LIMIT))
    except (OSError, ValueError, TypeError):
        return None
    return ticket if isinstance(ticket.submission, str) else None


@dataclass(frozen=True)
class Newest:
    """The newest job of a run, in the queue or not."""

    path: Path
    """Of its submission."""
    submission: Submission
    number: int
    """Of its element."""

    def element(self, job_ids: Mapping[str, str] | None = None) -> str:
        """SLURM's name of it, `123_4`; empty while nobody knows.

        Args:
            job_ids: by name, of what is in the queue: sbatch may have taken what it answered
                nobody.
        """
        job_id = self.submission.job_id or (job_ids or {}).get(self.submission.name, "")
        return f"{job_id}_{self.number}" if job_id else ""


def newest_of(runs: Iterable[RunPaths]) -> list[Newest | None]:
    """The newest job of each run; None where there is none, or nobody can read of it any more.

    Each submission is read once, however many runs are in it.
    """
    read: dict[str, Submission | None] = {}
    found: list[Newest | None] = []
    for paths in runs:
        ticket = read_ticket(paths)
        if ticket is not None and ticket.submission not in read:
            read[ticket.submission] = None
            with contextlib.suppress(EkeError):
                read[ticket.submission] = read_submission(Path(ticket.submission))
        newest = None
        if ticket is not None and (submission := read[ticket.submission]) is not None:
            newest = Newest(Path(ticket.submission), submission, ticket.element)
        found.append(newest)
    return found


def jobs_of(runs: Iterable[RunPaths]) -> list[str]:
    """SLURM's name of each run's newest job, `123_4`; empty if there is none that is known."""
    return [newest.element() if newest else "" for newest in newest_of(runs)]


def job_of(paths: RunPaths) -> str:
    """SLURM's name of one run's newest job."""
    return jobs_of([paths])[0]
