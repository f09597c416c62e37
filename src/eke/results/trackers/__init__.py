"""Experiment trackers: copies of a run's metrics that can never stop training."""

import dataclasses
import shlex
from collections.abc import Callable
from functools import partial

from eke.common.errors import EkeError
from eke.common.plugins import load_plugin
from eke.config.schema import TrackerMode
from eke.results.trackers.accelerate import (
    AccelerateRun,
    MLflowBackend,
    TensorBoardBackend,
    TrackerBackend,
    TrackioBackend,
)
from eke.results.trackers.async_tracker import Guard, Limits
from eke.results.trackers.tracker import TrackedRun, Tracker, Untracked, summary_values, tracker_id
from eke.results.trackers.wandb import WandbRun

ONLINE = Limits(finish_s=30.0)
"""Limit for an upload after the last step; `eke sync` sends the rest."""
OFFLINE = Limits(finish_s=10.0)
"""Offline, finishing takes milliseconds on a working file system."""

DATABASE = Limits(finish_s=30.0)
"""MLflow creates a database in seconds, maybe longer than a short run."""


def _wandb(run: TrackedRun) -> Tracker:
    limits = ONLINE if run.settings.mode is TrackerMode.online else OFFLINE
    remedy = f"eke sync {shlex.quote(str(run.directory))}"
    mirror = WandbRun(run, upload_s=0.8 * limits.finish_s)
    return Guard(mirror, dataclasses.replace(limits, remedy=remedy))


def _accelerate(make: Callable[[], TrackerBackend], limits: Limits, run: TrackedRun) -> Tracker:
    return Guard(AccelerateRun(run, make()), limits)


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "mlflow": partial(_accelerate, MLflowBackend, DATABASE),
    "none": lambda run: Untracked(),
    "tensorboard": partial(_accelerate, TensorBoardBackend, OFFLINE),
    "trackio": partial(_accelerate, TrackioBackend, OFFLINE),
    "wandb": _wandb,
}
"""`tracker` option -> builder."""


def build_tracker(run: TrackedRun) -> Tracker:
    """Build and start the tracker of `run.settings.option`.

    Never raises for errors of the tracker; they are in the result's `problem`.
    """
    option = run.settings.option
    if build := TRACKERS.get(option):
        return build(run)
    try:
        make_mirror = load_plugin("eke.trackers", option)
    except EkeError as error:
        return Untracked(str(error))
    if make_mirror is None:
        known = ", ".join(sorted(TRACKERS))
        return Untracked(f"tracker.option = {option}: not one of {known} -> tracker=none")
    return Guard(make_mirror(run), ONLINE)
