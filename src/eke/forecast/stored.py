"""Forecasts in records, and as JSON: the same fields in both."""

from typing import Any

from eke.forecast.advice import Advice, advise
from eke.forecast.known import known_forecast
from eke.forecast.values import Forecast, Verdict
from eke.plan import Plan
from eke.record import CalibratedMemory, Outcome, PredictedMemory, Record

SAVED = 0.85
"""Share of the expected peak that advice after running out of memory must come down to: a run that
should have fitted and did not needs more than what a forecast's error may be."""

PROPOSALS = 8


def predicted(plan: Plan) -> PredictedMemory:
    """What a run's record says it was expected to need."""
    return as_record(known_forecast(plan))


def as_record(found: Forecast) -> PredictedMemory:
    """A forecast as the record has it."""
    return PredictedMemory(
        low=found.peak.low,
        expected=found.peak.expected,
        high=found.peak.high,
        components=dict(found.components),
        method=found.method.value,
        basis=found.basis,
        allocated_bytes=found.allocated.expected,
        verdict=found.verdict.value,
        notes=list(found.notes),
        calibrated=_calibrated(found),
    )


def _calibrated(found: Forecast) -> CalibratedMemory | None:
    """Beside the forecast's own numbers, which calibration is made from, never instead of them."""
    by = found.calibrated
    if by is None:
        return None
    if by.peak is None or by.allocated is None:
        return CalibratedMemory(runs=by.num_runs, needed=by.needed)
    return CalibratedMemory(
        runs=by.num_runs,
        needed=by.needed,
        low=by.peak.low,
        expected=by.peak.expected,
        high=by.peak.high,
        allocated_bytes=by.allocated.expected,
        factor=by.factor,
        within_frac=by.within,
        versions=by.versions,
    )


def advice_for(plan: Plan) -> list[str]:
    """Overrides, ready to type, for a run that ran out of memory."""
    found = known_forecast(plan)
    if found.verdict is Verdict.unknown:
        return []
    enough = SAVED * found.peak.expected
    proposals = advise(plan, PROPOSALS)
    better = [each for each in proposals if each.forecast.peak.expected <= enough]
    return [as_text(advice) for advice in (better or proposals)[:3]]


def note_forecast(record: Record, plan: Plan) -> None:
    """Put into a record what was expected and, after an out-of-memory, what would need less."""
    record.memory.predicted = predicted(plan)
    if record.outcome == Outcome.oom.value:
        record.memory.advice = advice_for(plan)


def as_text(advice: Advice) -> str:
    """What to type."""
    return " ".join(advice.overrides)


def as_json(found: Forecast) -> dict[str, Any]:
    """A forecast under the record's field paths: `memory.predicted.low`."""
    from dataclasses import asdict

    return {"predicted": asdict(as_record(found)) | {"capacity": found.capacity}}
