"""One attempt at a run: build, train, and write a record in any case."""

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pkgutil import resolve_name
from textwrap import indent

import torch

from eke.common.paths import SHARED_DEVICE, RunPaths
from eke.estimate.time import record_step_time
from eke.hardware import has_foreign_processes
from eke.hardware.device_use import DeviceUse, cpu_cores
from eke.plan.planner import Plan, check_inputs, check_software, cut_of, remove_swap, swap_folder
from eke.plan.record import (
    EXIT_FAILED,
    EXIT_OK,
    IN_LOG,
    Failure,
    Outcome,
    RankFailure,
    cuts_of,
    metrics,
    read_attempts,
    write_end,
    write_record,
)
from eke.results.trackers import Tracker, summary_values
from eke.results.trackers.tracker import Untracked
from eke.training.distributed.ranks import SINGLE_PROCESS, Ranks
from eke.training.loop.environment import configure_allocator, quiet_libraries, seconds_since_start
from eke.training.loop.failure import Diverged, classify
from eke.training.loop.meter import Clock, Meter
from eke.training.loop.results import make_record, open_tracker, write_card
from eke.training.loop.saving import finish_saving
from eke.training.loop.stop import StopFlag
from eke.training.loop.training_state import TrainingState, torch_device
from eke.training.model.attention_kernels import pinned_backend
from eke.training.observe.memory_stages import device_peak, memory_in_use


def run_engine(job: TrainingState) -> None:
    """Train to the last step with the planned engine and attention kernel. Raises like `train`."""
    train = resolve_name(ENGINES[job.plan.config.engine.option])
    with pinned_backend(job.plan):
        try:
            train(job)
        except Diverged:  # raised on all ranks
            finish_saving(job)
            raise


ENGINES = {
    "loop": "eke.training.loop.loop:train",
    "trainer": "eke.training.loop.trainer_engine:train_with_trainer",
}
"""Training function of each `engine` option, by name: importing Trainer takes a second."""


_log = logging.getLogger(__name__)


@dataclass
class Attempt:
    """One start of a worker on a run."""

    plan: Plan
    paths: RunPaths
    number: int
    stop: StopFlag
    empty: int | None
    """Resident bytes before torch was imported."""
    ranks: Ranks = SINGLE_PROCESS
    stages: dict[str, int] = field(default_factory=dict)
    startup_s: float | None = None
    job: TrainingState | None = None
    shared: bool | None = None
    """True if another process used the device. None if unknown."""


def work(attempt: Attempt) -> int:
    """Train, write the record in any case, and return the exit code."""
    plan = attempt.plan
    shared = os.environ.get(SHARED_DEVICE)
    attempt.shared = True if shared else has_foreign_processes(plan.device)
    tracker = open_tracker(plan, attempt.paths, attempt.number)
    outcome, failure = _attempt_training(attempt, tracker)
    _write_last_rows(attempt)
    record = make_record(plan, attempt.paths, attempt.number, outcome, failure, attempt.job)
    record.timing.startup_s = attempt.startup_s
    record.shared_device = record.shared_device or attempt.shared  # an earlier attempt's steps
    write_record(attempt.paths, record)  # before the tracker, which may be slow
    with suppress(OSError):  # the summary is optional
        write_card(attempt.paths, record)
    record_step_time(plan, record)
    tracker.summary(summary_values(record, metrics.read_rows(attempt.paths.metrics)[0]))
    tracker.finish(outcome.exit_code)
    if tracker.problem:
        record.warnings.append(f"tracker: {tracker.problem}")
        write_record(attempt.paths, record)
    return outcome.exit_code


def run_follower(attempt: Attempt) -> int:
    """Train on a rank other than 0, log failures, and return the exit code."""
    outcome, failure = _attempt_training(attempt, Untracked())
    if failure is None or outcome not in (Outcome.oom, Outcome.crashed, Outcome.refused):
        return EXIT_OK  # all ranks ended together, and rank 0 records it
    if not failure.lost_contact:
        end = RankFailure(attempt.number, attempt.ranks.rank, outcome, failure)
        write_end(attempt.paths, end)
    return EXIT_FAILED


def _attempt_training(attempt: Attempt, tracker: Tracker) -> tuple[Outcome, Failure | None]:
    """Build and train. Returns the outcome in any case."""
    plan, paths, number, ranks = attempt.plan, attempt.paths, attempt.number, attempt.ranks
    quiet_libraries(plan)
    configure_allocator(plan)
    cuts, mine = cuts_of(read_attempts(paths)), cut_of(plan)
    meter = Meter(Clock(), number, timed_from=0, cut=cuts.index(mine) if mine in cuts else 0)
    try:
        device, empty = torch_device(plan), attempt.empty
        if device.type == "cuda":
            empty = memory_in_use(device)
            torch.ones(1, device=device)  # loads the kernels
        found = {"empty": empty, "kernels_loaded": memory_in_use(device)}
        attempt.stages |= {stage: used for stage, used in found.items() if used is not None}
        with verify_inputs(plan):
            how = attempt.stop, tracker, meter, attempt.stages, ranks
            job = attempt.job = TrainingState(plan, paths, number, *how)
        attempt.startup_s = seconds_since_start()
        _train(attempt, job)
        job.note_stage("training")
        if ranks.world_size > 1:
            peak = device_peak(job.device) or job.profiled_peak
            gathered = ranks.gather((peak, job.profiled, attempt.shared))
            job.peaks = [peak for peak, *_ in gathered]
            job.profiled = max(gathered, key=lambda each: each[0] or 0)[1]
            if any(shared for *_, shared in gathered):
                attempt.shared = True
        return Outcome.ok, None
    except BaseException as error:  # also bugs, signals and lack of memory end in a record
        begun = bool(meter.steps_ended)
        outcome, failure = classify(error, meter.phase, None if begun else plan)
        _log.error("%s: %s", outcome.value, failure.message)
        if failure.traceback and outcome is Outcome.crashed:  # other tracebacks are in the record
            _log.error(failure.traceback)
        elif failure.traceback and outcome is Outcome.refused:
            _log.error("traceback in %s\n%s", paths.log, indent(failure.traceback, IN_LOG))
        return outcome, failure
    finally:
        remove_swap(swap_folder(plan, paths), ranks.rank)


def _train(attempt: Attempt, job: TrainingState) -> None:
    """Run the engine and note whether another run used the devices. Raises like `train`."""
    devices = cpu_cores()
    if job.device.type == "cuda":
        first = job.device.index or 0  # nn.DataParallel also uses the following devices
        numbers = range(first, first + attempt.plan.batch.devices)
        devices = [str(torch.cuda.get_device_properties(n).uuid) for n in numbers]
    run = attempt.ranks.tell(secrets.token_hex(8))
    with closing(DeviceUse(run, devices, attempt.shared)) as use:
        job.meter.is_shared = use.is_shared
        try:
            run_engine(job)
        finally:
            attempt.shared = use.is_shared()


@contextmanager
def verify_inputs(plan: Plan) -> Iterator[None]:
    """Raise ChangedError before or after the block if inputs or software differ from the plan."""
    check_software(plan)
    check_inputs(plan)
    try:
        yield
    finally:  # a change also explains an error of the block
        check_software(plan)
        check_inputs(plan)


def _write_last_rows(attempt: Attempt) -> None:
    """Write the rows of the last steps, if the device still answers and the disk has space."""
    if attempt.job is None or attempt.ranks.world_size > 1:
        return  # each of several ranks has only its part of the losses, and a rank may be gone
    try:
        rows = attempt.job.meter.flush()
        metrics.append_rows(attempt.paths.metrics, rows)
        attempt.job.tracker.log(rows)
    except (RuntimeError, OSError) as error:
        _log.warning("the last steps could not be written: %s", error)
