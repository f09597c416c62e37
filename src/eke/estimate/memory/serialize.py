"""Forecasts in records, and as JSON: the same fields in both."""

from dataclasses import asdict
from typing import Any

from eke.estimate.memory.advice import Advice, Judge, advise
from eke.estimate.memory.best_forecast import known_forecast
from eke.estimate.memory.predict import allocated_of, with_room
from eke.estimate.memory.values import Forecast, Verdict
from eke.plan.planner import Micro, Plan, drawn
from eke.plan.record import CalibratedMemory, Outcome, PredictedMemory, Record

SAVED = 0.85
"""Share of the expected peak that advice after running out of memory must come down to: a run that
should have fitted and did not needs more than what a forecast's error may be."""

PROPOSALS = 3
"""In a record."""


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
        notes=list(found.doubts),
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


def advice_for(plan: Plan, judge: Judge | None = None, seen: int | None = None) -> list[str]:
    """Overrides, ready to type, for a run that ran out of memory.

    Args:
        plan: of the run.
        judge: as in `advise`.
        seen: bytes that it had when there were no more, of what is forecast: what needs less than
            that has room, whatever the device has; None where it was not measured.
    """
    found = known_forecast(plan)
    if found.verdict is Verdict.unknown and seen is None:
        return []
    expected, capacity = found.best.expected, found.capacity or found.best.expected
    for most in (min(expected, capacity, seen or expected), min(expected, capacity)):
        advice = advise(with_room(plan, int(SAVED * most)), PROPOSALS, judge)
        if advice:
            return [as_text(each) for each in advice]
    return [as_text(each) for each in advise(plan, PROPOSALS, judge)]


def note_forecast(
    record: Record, plan: Plan, judge: Judge | None = None, may_lack: bool = False
) -> None:
    """Put into a record what was expected and, after an out-of-memory, what would need less.

    Args:
        record: of a run that has ended.
        plan: of the run.
        judge: as in `advise`.
        may_lack: the host's memory may have run out, although the outcome does not say so; of a
            GPU's that says nothing.
    """
    record.memory.predicted = predicted(plan)
    ran_short = may_lack and plan.device.kind == "cpu"
    if ran_short or record.outcome == Outcome.oom.value:
        record.memory.advice = advice_for(plan, judge, memory_seen(plan, record))


def note_measured_batch(record: Record, plan: Plan, micro: Micro | None) -> None:
    """Compare what was measured with the forecast of the very micro-batch that was measured.

    Args:
        record: with the forecast of the longest micro-batch.
        plan: of the run.
        micro: on a CPU the largest one of the profiled step; None elsewhere.
    """
    found, made = record.memory.predicted, drawn(plan)
    if micro is None or found is None or not found.allocated_bytes or micro == made.expected:
        return
    change = allocated_of(plan, micro) - allocated_of(plan, made.expected)
    by = found.calibrated
    if by is not None and by.allocated_bytes is not None:
        by.allocated_bytes += round(change * by.allocated_bytes / found.allocated_bytes)
    found.allocated_bytes += change


def memory_seen(plan: Plan, record: Record) -> int | None:
    """Bytes that a run had when it ran out of memory, of what is forecast; None if not measured.

    Of a GPU what PyTorch had reserved, with the driver's context as forecast, as for calibration;
    of a CPU what the process had grown by since its libraries were loaded.
    """
    measured, expected = record.memory.measured, record.memory.predicted
    if measured is None:
        return None
    if plan.device.kind != "cpu":
        context = expected.components.get("context", 0) if expected else 0
        reserved = measured.peak_reserved_bytes
        return reserved + context if reserved else None
    before, peak = measured.stages.get("kernels_loaded"), measured.process_peak_bytes
    if before is None or peak is None or peak <= before:
        return None
    return peak - before


def as_text(advice: Advice) -> str:
    """What to type."""
    return " ".join(advice.overrides)


def as_json(found: Forecast) -> dict[str, Any]:
    """A forecast under the record's field paths: `memory.predicted.low`."""
    return {"predicted": asdict(as_record(found)) | {"capacity": found.capacity}}
