"""What a tracker is told about a run that is about to start."""

from eke.common.paths import RunPaths
from eke.config.schema.codec import make_converter
from eke.plan.planner import Plan
from eke.results.trackers import TrackedRun, Tracker, build_tracker, tracker_id
from eke.results.trackers import summary_values as summary_values  # the worker's end
from eke.results.trackers.describe import shown_of


def open_tracker(plan: Plan, paths: RunPaths, attempt: int) -> Tracker:
    """The tracker the configuration asks for; trouble with it is its own, never the run's."""
    return build_tracker(
        TrackedRun(
            run_id=tracker_id(paths.folder.name, plan.run_id),
            group=plan.config.tracker.group,
            tags=(plan.device.name,),
            directory=paths.folder,
            attempt=attempt,
            settings=plan.config.tracker,
            **shown_of(
                plan.overrides,
                plan.command,
                {**plan.choices, "device": plan.device.name},
                make_converter().unstructure(plan.config),
            ),
        )
    )
