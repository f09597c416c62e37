"""Trainings in this process whose objects a test wants to look at afterwards."""

import copy
import shutil
from pathlib import Path
from typing import Any

from support import TINY

from eke.common.paths import RunPaths
from eke.plan.planner import Plan
from eke.plan.record import Outcome, Record, metrics
from eke.results.trackers.tracker import Untracked
from eke.training.checkpoint import checkpoint_name
from eke.training.loop.attempt import run_engine
from eke.training.loop.meter import Clock, Meter
from eke.training.loop.results import make_record
from eke.training.loop.stop import StopFlag
from eke.training.loop.training_state import TrainingState

BRIEF = (
    *TINY, "data=synthetic", "data.seq_len=16", "data.num_samples=16", "data.num_eval_samples=4",
    "batch.per_device=4", "train.steps=4", "train.timing_warmup_steps=2",
    "train.checkpoint_every=null", "train.save_final=false",
)  # fmt: skip
"""Four steps, two of which are timed, and no checkpoint."""


def start_job(plan: Plan, folder: Path, attempt: int = 0) -> TrainingState:
    """The job of a plan before its first step, or after a checkpoint in the folder."""
    folder.mkdir(exist_ok=True)
    meter = Meter(Clock(), attempt, 0)
    return TrainingState(plan, RunPaths(folder), attempt, StopFlag(), Untracked(), meter, {})


def train_job(plan: Plan, folder: Path, attempt: int = 0) -> TrainingState:
    """The job of a plan after its last step; continues from a checkpoint in the folder."""
    job = start_job(plan, folder, attempt)
    run_engine(job)
    return job


def changed(job: TrainingState, **values: Any) -> TrainingState:
    """The same job, which is not begun again, with other attributes."""
    made = copy.copy(job)
    vars(made).update(values)
    return made


def record_of(job: TrainingState) -> Record:
    """The record that a worker would write now."""
    return make_record(job.plan, job.paths, job.attempt, Outcome.ok, None, job)


def steps_of(job: TrainingState) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step this attempt took."""
    rows, _ = metrics.read_rows(job.paths.metrics)
    return {
        row[metrics.STEP]: (row[metrics.LOSS], row[metrics.GRAD_NORM])
        for row in metrics.latest(rows, metrics.LOSS)
        if row[metrics.ATTEMPT] == job.attempt
    }


def continue_job(job: TrainingState, step: int, folder: Path) -> TrainingState:
    """The same run again, in another folder, from its checkpoint after `step` steps."""
    name = checkpoint_name(step)
    (folder / "checkpoints").mkdir(parents=True)
    shutil.copytree(job.paths.checkpoints / name, folder / "checkpoints" / name)
    return train_job(job.plan, folder, attempt=job.attempt + 1)
