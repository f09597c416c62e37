"""Experiment trackers: copies of a run's metrics that can never stop training."""

import shlex
from collections.abc import Callable

from eke.common.errors import EkeError
from eke.common.plugins import load_plugin
from eke.config.schema import TrackerMode
from eke.results.trackers.accelerate import MLflowRun, TensorBoardRun, TrackioRun
from eke.results.trackers.async_tracker import AsyncTracker
from eke.results.trackers.tracker import TrackedRun, Untracked, summary_values, tracker_id
from eke.results.trackers.wandb import WandbRun

Tracker = AsyncTracker | Untracked
"""Receiver of a run's metrics. No method raises, or waits longer than its stated limit."""

FILE_S = 10.0
"""Time limit for closing a file, in seconds. A working file system needs milliseconds."""

SERVER_S = 30.0
"""Time limit for an upload (`eke sync` sends the rest) or MLflow's new database, in seconds."""


def _wandb(run: TrackedRun) -> Tracker:
    seconds = SERVER_S if run.settings.mode is TrackerMode.online else FILE_S
    remedy = f"eke sync {shlex.quote(str(run.directory))}"
    return AsyncTracker(WandbRun(run, upload_s=0.8 * seconds), seconds, remedy)


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "mlflow": lambda run: AsyncTracker(MLflowRun(run), SERVER_S),
    "none": lambda run: Untracked(),
    "tensorboard": lambda run: AsyncTracker(TensorBoardRun(run), FILE_S),
    "trackio": lambda run: AsyncTracker(TrackioRun(run), FILE_S),
    "wandb": _wandb,
}
"""`tracker` option -> builder."""


def build_tracker(run: TrackedRun) -> Tracker:
    """Build and start the tracker of `run.settings.option`. Its errors are in `problem`."""
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
    return AsyncTracker(make_mirror(run), SERVER_S)
