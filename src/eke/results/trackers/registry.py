"""Registry of trackers by option."""

import dataclasses
import shlex
from collections.abc import Callable

from eke.common.errors import EkeError
from eke.common.plugins import load_plugin
from eke.config.schema import TrackerMode
from eke.results.trackers.accelerate import AccelerateRun, TrackerBackend
from eke.results.trackers.async_tracker import Guard, Limits
from eke.results.trackers.mlflow import MLflowBackend
from eke.results.trackers.tensorboard import TensorBoardBackend
from eke.results.trackers.tracker import TrackedRun, Tracker, Untracked
from eke.results.trackers.trackio import TrackioBackend
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


def _over_accelerate(
    make: Callable[[], TrackerBackend], limits: Limits = OFFLINE
) -> Callable[[TrackedRun], Tracker]:
    def build(run: TrackedRun) -> Tracker:
        return Guard(AccelerateRun(run, make()), limits)

    return build


def _none(run: TrackedRun) -> Tracker:
    return Untracked()


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "mlflow": _over_accelerate(MLflowBackend, DATABASE),
    "none": _none,
    "tensorboard": _over_accelerate(TensorBoardBackend),
    "trackio": _over_accelerate(TrackioBackend),
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
