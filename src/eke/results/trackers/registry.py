"""Which option builds which tracker."""

import dataclasses
import shlex
from collections.abc import Callable

from eke.config.schema import TrackerMode
from eke.results.trackers.accelerate import AccelerateRun, Backend
from eke.results.trackers.async_tracker import Guard, Limits
from eke.results.trackers.mlflow import MLflowBackend
from eke.results.trackers.tensorboard import TensorBoardBackend
from eke.results.trackers.tracker import TrackedRun, Tracker, Untracked
from eke.results.trackers.trackio import TrackioBackend
from eke.results.trackers.wandb import WandbRun

ONLINE = Limits(finish_s=30.0)
"""An upload that takes longer than half a minute after the last step is left to `eke sync`."""
OFFLINE = Limits(finish_s=10.0)
"""Offline, finishing takes milliseconds; ten seconds is a file system in trouble."""

DATABASE = Limits(finish_s=30.0)
"""MLflow makes a new database in seconds; a short run is over before that."""


def _wandb(run: TrackedRun) -> Tracker:
    limits = ONLINE if run.settings.mode is TrackerMode.online else OFFLINE
    remedy = f"eke sync {shlex.quote(str(run.directory))}"
    mirror = WandbRun(run, upload_s=0.8 * limits.finish_s)
    return Guard(mirror, dataclasses.replace(limits, remedy=remedy))


def _over_accelerate(
    make: Callable[[], Backend], limits: Limits = OFFLINE
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
"""Option of the group `tracker` -> the function that builds it."""


def build_tracker(run: TrackedRun) -> Tracker:
    """The tracker of `run.settings.option`, already started.

    Never raises for the tracker's own trouble: what went wrong is in the result's `problem`.
    """
    build = TRACKERS.get(run.settings.option)
    if build is None:
        known = ", ".join(sorted(TRACKERS))
        return Untracked(
            f"tracker.option = {run.settings.option}: there are only {known} -> tracker=none"
        )
    return build(run)
