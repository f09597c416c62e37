"""Submission of runs as job arrays, each run at most once, also after crashes."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from eke.common.errors import BusyError, EkeError
from eke.common.files import make_private_dir, open_shared_lock, write_atomic, write_json
from eke.common.paths import RunPaths
from eke.common.text import format_number
from eke.config.schema.resources import Slurm
from eke.launch.processes.run_attempt import write_plan_files
from eke.launch.processes.run_dir import lock_run_folder, lock_within
from eke.launch.processes.sweep import Job
from eke.launch.slurm import scheduler
from eke.launch.slurm.cluster_run import note_software
from eke.launch.slurm.submission_file import (
    NAME,
    Request,
    Submission,
    make_request,
    name_in_runs,
    new_submission,
    read_submission,
    read_ticket,
    script_text,
    submission_file,
    with_job,
    write_submission,
)

GIVEN_UP_S = 30.0
"""Seconds after which an intent unknown to SLURM has failed: its sbatch, with the lock, ended."""

_LOOK_S = 1.0
"""Interval between two queries for an intent, or two tries of a lock, in seconds."""

LEDGER_LOCK = ".submitting"
"""Name of the lock in the folder of all runs."""

PATIENCE_S = 60.0
"""Longest wait in seconds for another process that submits."""


def arrays(jobs: Sequence[Job], limit: int) -> list[tuple[Request, list[Job]]]:
    """Group jobs by request into arrays of at most `limit` jobs. Errors as in `make_request`."""
    groups: dict[tuple[Request, str], list[Job]] = {}
    for job in jobs:
        key = make_request(job.plan), repr(job.plan.config.slurm)
        groups.setdefault(key, []).append(job)
    return [
        (request, group[start : start + limit])
        for (request, _), group in groups.items()
        for start in range(0, len(group), limit)
    ]


@contextmanager
def submitting(
    folder: Path, patience_s: float = 0.0, sleep: Callable[[float], None] = time.sleep
) -> Iterator[int]:
    """Lock the ledgers of a runs folder. Raise BusyError, or ConfigError without file locks."""
    make_private_dir(folder)
    runs = folder.parents[1]
    descriptor = open_shared_lock(runs / LEDGER_LOCK)
    try:
        if not lock_within(descriptor, runs, patience_s, _LOOK_S, sleep):
            raise BusyError(f"{runs}: another process submits runs. Try again in a few seconds")
        yield descriptor
    finally:
        os.close(descriptor)


def resolve_pending_submissions(
    folder: Path, runs: Sequence[RunPaths], sleep: Callable[[float], None] = time.sleep
) -> None:
    """Find the job id of each submission without an answer by sbatch, or delete the submission.

    Raise EkeError if the queue is unknown, since a run must not be submitted twice.
    """
    while True:
        own = {path: read_submission(path) for path in folder.absolute().glob("eke-*.json")}
        found = {**_submissions_of(runs), **own}
        intents = {path: each for path, each in found.items() if not each.job_id}
        known = scheduler.jobs_of_names([each.name for each in intents.values()])
        may_turn_up = False
        for path, each in intents.items():
            if each.name in known:
                with_job(path, each, known[each.name])
            elif abs(time.time() - each.created) <= GIVEN_UP_S:
                may_turn_up = True  # sbatch may still reach SLURM
            elif path in own:
                _delete_submission(path)
        if not may_turn_up:
            return
        sleep(_LOOK_S)


def _submissions_of(runs: Sequence[RunPaths]) -> dict[Path, Submission]:
    """Return the newest submission of each run, also of another sweep, if it is readable."""
    found = {}
    for file in {ticket.submission for ticket in map(read_ticket, runs) if ticket}:
        with suppress(EkeError):
            found[Path(file)] = read_submission(Path(file))
    return found


def submit_array(
    folder: Path, sweep: str, request: Request, jobs: Sequence[Job], lock: int
) -> Submission:
    """Submit runs with frozen plans as one array. SubmissionRefused leaves no files behind.

    Raises EkeError if sbatch may have accepted the array. Then the intent stays.
    """
    profile = jobs[0].plan.config.slurm
    runs = [str(Path(job.folder).absolute()) for job in jobs]
    submission = new_submission(sweep, runs, profile.max_restarts)
    path = submission_file(folder, submission).absolute()
    script = path.with_suffix(".sbatch")
    text = script_text(request, profile, submission.name, path, len(jobs))
    write_atomic(script, text, mode=0o600)  # the profile's shell lines may be private
    write_submission(path, submission)
    note_software(path)
    name_in_runs(path, submission)
    try:
        job_id = scheduler.submit(script, [lock])
    except scheduler.SubmissionRefused:
        for run in runs:
            RunPaths(Path(run)).ticket(NAME).unlink(missing_ok=True)
        _delete_submission(path)
        raise
    return with_job(path, submission, job_id)


def _delete_submission(path: Path) -> None:
    path.unlink()
    for ending in (".sbatch", ".software"):
        path.with_suffix(ending).unlink(missing_ok=True)


def freeze_run(job: Job) -> None:
    """Write the final plan into the run's folder. Raise BusyError or EkeError on failure."""
    paths = RunPaths(Path(job.folder))
    try:
        with lock_run_folder(paths):
            write_plan_files(paths, job.plan)
            write_json(paths.planned_with, job.plan.machine)
    except OSError as error:
        raise EkeError(f"{paths.folder} cannot be written: {error.strerror or error}") from error


def describe_request(request: Request, num_runs: int, profile: Slurm) -> str:
    """Return the resources of one array in one line."""
    each = " per node" if request.nodes > 1 else ""
    parts = [format_number(num_runs, "run"), f"at most {request.minutes} min each"]
    parts += [f"{request.nodes} nodes"] if each else []
    parts += [format_number(request.gpus, "GPU") + each] if request.gpus else []
    parts += [format_number(request.cpus, "core") + each]
    parts += [f"{request.memory} of memory{each}"] if request.memory else []
    parts += [f"partition {request.partition}"] if request.partition else []
    if num_runs > profile.max_parallel:
        parts += [f"at most {profile.max_parallel} at a time"]
    return ", ".join(parts)
