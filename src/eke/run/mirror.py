"""What a tracker is told about a run."""

import shlex
import sys
from collections.abc import Mapping

from eke.paths import RunPaths
from eke.plan import Plan
from eke.record import Record
from eke.schema.codec import make_converter
from eke.track import TrackedRun, Tracker, build_tracker


def open_tracker(plan: Plan, paths: RunPaths, attempt: int) -> Tracker:
    """The tracker the configuration asks for; trouble with it is its own, never the run's."""
    return build_tracker(
        TrackedRun(
            run_id=plan.run_id,
            name=plan.name,
            group=plan.config.tracker.group,
            tags=(plan.device.name,),
            notes=shlex.join(["python", "train.py", *plan.overrides]),
            factors={**plan.choices, "device": plan.device.name},
            config=make_converter().unstructure(plan.config),
            directory=paths.folder,
            attempt=attempt,
            settings=plan.config.tracker,
        )
    )


def summary_values(record: Record) -> Mapping[str, float | int | str]:
    """The record's main numbers as flat values; what was not measured is left out."""
    memory = record.memory.measured
    step = record.timing.steady_step_s
    values: dict[str, float | int | str | None] = {
        "outcome": record.outcome,
        "samples_per_s": record.throughput.samples_per_s,
        "tokens_per_s": record.throughput.tokens_per_s,
        "mfu_frac": record.throughput.mfu_frac,
        "steady_step_s": step.median if step else None,
        "peak_allocated_bytes": memory.peak_allocated_bytes if memory else None,
        "peak_reserved_bytes": memory.peak_reserved_bytes if memory else None,
        "eval_start": record.loss.eval_start,
        "eval_final": record.loss.eval_final,
        "python": sys.version.split()[0],
    }
    return {key: value for key, value in values.items() if value is not None}
