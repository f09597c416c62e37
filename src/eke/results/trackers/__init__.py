"""Experiment trackers: copies of a run's metrics that can never stop training."""

from eke.results.trackers.registry import TRACKERS, build_tracker
from eke.results.trackers.tracker import TrackedRun, Tracker, summary_values, tracker_id

__all__ = [
    "TRACKERS",
    "TrackedRun",
    "Tracker",
    "build_tracker",
    "summary_values",
    "tracker_id",
]
