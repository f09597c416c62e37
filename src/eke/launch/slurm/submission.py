"""The ledger of a submission: written before sbatch is called, completed when it has answered.

A kill between the two leaves an intent: whoever comes next asks SLURM for a job of that name before
submitting anything again. Nothing here is pickled; a job's input is a path.
"""

import contextlib
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eke.errors import EkeError
from eke.files import read_json, write_json
from eke.paths import RunPaths

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
    """What a run folder says of its newest job."""

    submission: str
    """The submission's file."""
    element: int
    stalled: int = 0
    """Restarts since a step was made that had not been made before."""


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
    """Note what SLURM calls it, here and in the folder of each run.

    The tickets come first: a kill in between leaves an intent, with which all this is done again.
    """
    known = replace(submission, job_id=job_id)
    for number, run in enumerate(known.runs):
        with contextlib.suppress(FileNotFoundError):  # somebody has deleted the run meanwhile
            write_ticket(RunPaths(Path(run)), Ticket(str(path), number))
    write_submission(path, known)
    return known


def write_ticket(paths: RunPaths, ticket: Ticket) -> None:
    """Note a run's newest job in its folder."""
    write_json(paths.ticket, asdict(ticket))


def read_ticket(paths: RunPaths) -> Ticket | None:
    """A run's newest job; None where there is none, or nobody can read it any more."""
    try:
        ticket = Ticket(**read_json(paths.ticket))
    except (OSError, ValueError, TypeError):
        return None
    return ticket if isinstance(ticket.submission, str) else None


def jobs_of(runs: Iterable[RunPaths]) -> list[str]:
    """SLURM's name of each run's newest job, `123_4`; empty if there is none that is known.

    Each submission is read once, however many runs are in it.
    """
    job_ids: dict[str, str] = {}
    found = []
    for paths in runs:
        ticket = read_ticket(paths)
        if ticket is None:
            found.append("")
            continue
        file = ticket.submission
        if file not in job_ids:
            try:
                job_ids[file] = read_submission(Path(file)).job_id
            except EkeError:
                job_ids[file] = ""
        found.append(f"{job_ids[file]}_{ticket.element}" if job_ids[file] else "")
    return found


def job_of(paths: RunPaths) -> str:
    """SLURM's name of one run's newest job."""
    return jobs_of([paths])[0]
