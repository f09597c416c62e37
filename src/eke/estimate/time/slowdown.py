"""Slowdown of a changed plan per sample, which ranks memory advice.

Predicted step times in records, and as JSON: the same fields in both.
"""

from dataclasses import asdict
from typing import Any

from eke.estimate.memory import note_forecast
from eke.estimate.time.step_time import forecast_time
from eke.estimate.time.time_history import prior_time
from eke.estimate.time.values import Span, StepTime, Unknown
from eke.plan.planner import Plan
from eke.plan.record import CalibratedStep, PredictedStep, Record

SOURCE = "the time model's estimate for this device, {} (docs/how-to/forecast.md)"


def slowdown(now: Plan, changed: Plan) -> tuple[float, str] | None:
    """Expected time of a sample over what it is now, and its source; None where it is not known.

    Finished runs correct both times or neither: those of one way to share a model out, for
    example, say nothing of another, and a correction of one side alone would be taken for speed.

    Args:
        now: as planned.
        changed: the same training with other techniques.
    """
    before, after = forecast_time(now), forecast_time(changed)
    runs = min(num_runs(before), num_runs(after))
    if not runs:
        before, after = prior_time(now), prior_time(changed)
    if not (isinstance(before, StepTime) and isinstance(after, StepTime)):
        return None
    known = f"calibrated by {runs} runs on it" if runs else "not calibrated"
    return before.samples_per_s.expected / after.samples_per_s.expected, SOURCE.format(known)


def num_runs(found: StepTime | Unknown) -> int:
    """Finished runs that an estimate is corrected by, or known from; 0 for datasheets alone."""
    by = None if isinstance(found, Unknown) else found.calibrated
    return by.num_runs if by is not None and by.is_used else 0


def note_predictions(record: Record, plan: Plan, may_lack: bool = False) -> None:
    """Put into a record what was expected of memory and time.

    Args:
        record: of a run that has ended.
        plan: of the run.
        may_lack: the host's memory may have run out, although the outcome does not say so.
    """
    note_forecast(record, plan, slowdown, may_lack)
    found = forecast_time(plan)
    if isinstance(found, StepTime):
        record.timing.predicted_step_s = as_record(found)


def as_record(found: StepTime) -> PredictedStep:
    """An estimate as the record has it."""
    by = found.calibrated
    calibrated = None
    if by is not None:
        used = by.is_used
        calibrated = CalibratedStep(
            runs=by.num_runs,
            needed=by.needed,
            factor=by.factor if used else None,
            within_frac=by.within if used else None,
            versions=by.versions,
        )
    return PredictedStep(
        low=found.step_s.low,
        expected=found.step_s.expected,
        high=found.step_s.high,
        parts=dict(found.parts),
        limit=found.limit,
        basis=found.basis,
        notes=list(found.notes),
        calibrated=calibrated,
    )


def as_json(found: StepTime | Unknown) -> dict[str, Any]:
    """An estimate under the record's field paths: `timing.predicted_step_s.low`."""
    if isinstance(found, Unknown):
        return {"timing": {"predicted_step_s": None, "unknown": found.reason}}
    mfu = _ends(found.mfu) if found.mfu else None
    return {
        "timing": {
            "predicted_step_s": asdict(as_record(found)),
            "predicted_train_s": _ends(found.total_s),
            "predicted_device_hours": _ends(found.gpu_hours),
        },
        "throughput": {
            "predicted_samples_per_s": _ends(found.samples_per_s),
            "predicted_tokens_per_s": _ends(found.tokens_per_s),
            "predicted_mfu_frac": mfu,
        },
    }


def _ends(span: Span) -> dict[str, float]:
    return asdict(span)
