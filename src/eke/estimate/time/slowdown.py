"""How much longer a changed plan takes for its samples: what ranks advice against running out."""

from eke.estimate.time.estimate import forecast_time
from eke.estimate.time.predict import prior_time
from eke.estimate.time.values import StepTime, Unknown
from eke.plan.planner import Plan

SOURCE = "the time model's estimate for this device, {} (docs/forecast.md)"


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
