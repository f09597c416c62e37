"""One attempt at a run: build, train, and a record whatever happens."""

import logging
import warnings
from dataclasses import dataclass, field

import torch

from eke.hardware import foreign_processes
from eke.paths import RunPaths
from eke.plan import Plan
from eke.record import Failure, Outcome, metrics, write_record
from eke.run.failure import classify
from eke.run.job import Job, build_job, choose_device
from eke.run.loop import train
from eke.run.memory import memory_in_use
from eke.run.meter import HostClock, Meter
from eke.run.mirror import open_tracker, summary_values
from eke.run.process import seconds_since_start
from eke.run.results import make_record
from eke.run.stop import StopFlag

log = logging.getLogger(__name__)


@dataclass
class Attempt:
    """One start of a worker on a run."""

    plan: Plan
    paths: RunPaths
    number: int
    stop: StopFlag
    empty: int | None
    """Resident memory before torch was imported."""
    stages: dict[str, int] = field(default_factory=dict)
    startup_s: float | None = None
    job: Job | None = None


def work(attempt: Attempt) -> int:
    """Train, and write the record whatever happens; returns the outcome's exit code."""
    quiet_libraries()
    plan = attempt.plan
    foreign = foreign_processes(plan.device)
    meter = Meter(HostClock(), attempt.number, timed_from=0)
    tracker = open_tracker(plan, attempt.paths, attempt.number)
    failure: Failure | None = None
    try:
        note_first_stages(attempt)
        attempt.job = build_job(
            plan, attempt.paths, attempt.number, attempt.stop, tracker, meter, attempt.stages
        )
        attempt.startup_s = seconds_since_start()
        train(attempt.job)
        attempt.job.note_stage("training")
        outcome = Outcome.ok
    except BaseException as error:  # an out-of-memory, a bug and a signal all end in a record
        outcome, failure = classify(error, meter.phase)
        write_last_rows(attempt)
        say_failure(outcome, failure)
    record = make_record(plan, attempt.paths, attempt.number, outcome, failure, attempt.job)
    record.timing.startup_s = attempt.startup_s
    record.shared_device = None if foreign is None else bool(foreign)
    write_record(attempt.paths, record)  # first: a tracker may take its time, a preemption does not
    tracker.summary(summary_values(record))
    tracker.finish(outcome.exit_code)
    if tracker.problem:
        record.warnings.append(f"tracker: {tracker.problem}")
        write_record(attempt.paths, record)
    return outcome.exit_code


def note_first_stages(attempt: Attempt) -> None:
    """Memory before anything, and once the libraries (on a GPU: the kernels) are loaded."""
    device = choose_device(attempt.plan)
    if device.type == "cpu" and attempt.empty is not None:
        attempt.stages["empty"] = attempt.empty
    if device.type == "cuda":
        if (used := memory_in_use(device)) is not None:
            attempt.stages["empty"] = used
        torch.ones(1, device=device)  # loads the kernels, as the guides do
    if (used := memory_in_use(device)) is not None:
        attempt.stages["kernels_loaded"] = used


def write_last_rows(attempt: Attempt) -> None:
    """Write the steps since the last write, if the device still answers and the disk takes them."""
    if attempt.job is None:
        return
    try:
        rows = attempt.job.meter.flush()
        metrics.append_rows(attempt.paths.metrics, rows)
        attempt.job.tracker.log(rows)
    except (RuntimeError, OSError) as error:
        log.warning("the last steps could not be written: %s", error)


def say_failure(outcome: Outcome, failure: Failure) -> None:
    """Into the log, with the traceback of what nobody foresaw (the record has the others')."""
    log.error("%s: %s", outcome.value, failure.message)
    if failure.traceback and outcome is Outcome.crashed:
        log.error(failure.traceback)


def quiet_libraries() -> None:
    """Keep progress bars and advice of other libraries out of the log."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
