"""Which option builds which tracker."""

from collections.abc import Callable

from eke.schema import TrackerMode
from eke.track.guard import Guard, Limits
from eke.track.tracker import TrackedRun, Tracker, Untracked
from eke.track.wandb_run import WandbRun

ONLINE = Limits(finish_s=30.0)
"""An upload that takes longer than half a minute after the last step is left to `wandb sync`."""
OFFLINE = Limits(finish_s=10.0)
"""Offline, finishing takes milliseconds; ten seconds is a file system in trouble."""


def _wandb(run: TrackedRun) -> Tracker:
    limits = ONLINE if run.settings.mode is TrackerMode.online else OFFLINE
    return Guard(WandbRun(run, upload_s=0.8 * limits.finish_s), limits)


def _none(run: TrackedRun) -> Tracker:
    return Untracked()


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {"none": _none, "wandb": _wandb}
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
