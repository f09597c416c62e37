"""Mirrors of a run outside its folder: a tracker sees every row and can never stop training."""

from eke.track.describe import summary_values, tracker_id
from eke.track.table import TRACKERS, build_tracker
from eke.track.tracker import TrackedRun, Tracker

__all__ = [
    "TRACKERS",
    "TrackedRun",
    "Tracker",
    "build_tracker",
    "summary_values",
    "tracker_id",
]
