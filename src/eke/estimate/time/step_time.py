"""Best estimate of a step's time: datasheets corrected by runs, or rates fitted to runs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from math import exp, expm1, inf, log
from typing import TYPE_CHECKING, Any

from eke.common.text import format_count, format_number, format_range, format_seconds
from eke.estimate.memory.render_memory import wrapped
from eke.estimate.time.flops import Work
from eke.estimate.time.rates import STEP_PARTS, ZERO_SPAN, Span, StepTime, Unknown
from eke.estimate.time.time_history import (
    Observation,
    amounts_of,
    calibrated_step_time,
    describe_step,
    read_observations,
    time_group,
    why_unknown,
)
from eke.plan.planner import Plan
from eke.plan.record import CalibratedStep, PredictedStep

if TYPE_CHECKING:
    from eke.estimate.time.rate_regression import Correction


def time_rows(
    found: StepTime | Unknown, steps: int, kind: str, details: bool = False
) -> list[tuple[str, str]]:
    """Return names and texts of step time, rates, the entire run and the source."""
    if isinstance(found, Unknown):
        return [("time", f"unknown: {found.reason}")]
    hours, limit = found.gpu_hours, f"limited by {found.limit}"
    if details:
        limit += f" ({_shares(found)})"
    between = _format_span(found.step_s)
    total = (
        f"{format_number(steps, 'step')}, {format_seconds(found.total_s.expected)}, about "
        f"{_hours(hours.expected)} {_unit(kind)} ({_hours(hours.low)} to {_hours(hours.high)}), "
        "training steps only"
    )
    return [
        ("step", f"{format_seconds(found.step_s.expected)} ({between}), {limit}"),
        ("speed", _rates(found)),
        ("total", total),
        ("source", f"estimate by {found.basis}{_calibration(found)}"),
        *(("", f"not exact: {note}") for note in found.notes if details),
    ]


def time_line(found: StepTime | Unknown) -> str:
    """Return the estimate in one line, for a run that is about to start."""
    if isinstance(found, Unknown):
        return f"unknown: {found.reason}"
    step, whole = found.step_s, format_seconds(found.total_s.expected)
    return f"{_format_span(step)} per step, {whole} in all (estimate)"


def _format_span(step: Span) -> str:
    return format_range(format_seconds(step.low), format_seconds(step.high))


def speed_cell(found: StepTime | Unknown) -> str:
    """Return samples per second as a range, "" if unknown."""
    if isinstance(found, Unknown):
        return ""
    rate = found.samples_per_s
    return f"{_number(rate.low)} to {_number(rate.high)}"


def sum_line(found: Sequence[StepTime | Unknown], kind: str) -> str:
    """Return the device-hours of many runs, and the number of runs without an estimate."""
    known = [each.gpu_hours for each in found if isinstance(each, StepTime)]
    unknown = [each.reason for each in found if isinstance(each, Unknown)]
    lines = []
    if known:
        whole = sum(known, ZERO_SPAN)
        text = (
            f"{_unit(kind)} (estimate): about {_hours(whole.expected)} "
            f"({_hours(whole.low)} to {_hours(whole.high)}) for {format_number(len(known), 'run')}"
            ", training steps only"
        )
        lines.append(wrapped(text, 0))
    for reason, count in Counter(unknown).items():
        text = f"without an estimate: {format_number(count, 'run')}: {reason}"
        lines.append(wrapped(text, 0))
    return "\n".join([*lines, *table_notes(found)])


def table_notes(found: Iterable[StepTime | Unknown]) -> list[str]:
    """Return each note about uncertainty once, with its number of rows."""
    notes = Counter(note for each in found if isinstance(each, StepTime) for note in each.notes)
    return [
        wrapped(f"not exact: {format_number(n, 'run')}: {note}", 0) for note, n in notes.items()
    ]


def _shares(found: StepTime) -> str:
    whole = sum(found.parts.values()) or 1.0
    largest = sorted(found.parts.items(), key=lambda item: -item[1])
    shown = [(name, seconds) for name, seconds in largest if seconds >= 0.005 * whole]
    words = [f"{STEP_PARTS[name]} {seconds / whole:.0%}" for name, seconds in shown[1:]]
    first = f"{shown[0][1] / whole:.0%}" if shown else "0%"
    return ", ".join([f"{first} of it", *words])


def _rates(found: StepTime) -> str:
    samples, tokens = found.samples_per_s, found.tokens_per_s
    parts = [f"{_number(samples.low)} to {_number(samples.high)} samples/s"]
    if tokens.high:
        parts.append(f"{format_count(tokens.low)} to {format_count(tokens.high)} tokens/s")
    if found.mfu is not None:
        parts.append(f"MFU {found.mfu.low:.0%} to {found.mfu.high:.0%}")
    return ", ".join(parts)


def _calibration(found: StepTime) -> str:
    by = found.calibrated
    if by is None:
        return ""
    runs = f"{format_number(by.runs, 'run')} on this device"
    if by.factor is None or by.within_frac is None:
        return f"; not calibrated: {runs} ({by.needed} needed)"
    within = f"{by.within_frac:.0%}"
    return f"; calibrated by {runs} ({by.versions}): x {by.factor:.3g}, within +-{within}"


def _unit(kind: str) -> str:
    return "CPU-hours" if kind == "cpu" else "GPU-hours"


def _hours(hours: float) -> str:
    return f"{hours:.2g}" if hours < 10 else f"{hours:,.0f}"


def _number(rate: float) -> str:
    if rate >= 1000:
        return f"{rate / 1000:.3g}k"
    return f"{rate:.2g}" if rate < 10 else f"{rate:.0f}"


MIN_CALIBRATION_RUNS = 5
"""Configurations of a group needed for a correction. Five on one side of the truth happen in 6 % of
cases (2 * 0.5^5), four in 12 %, and Student's interval is much wider below five."""

_MAX_CALIBRATION_RUNS = 60
"""Number of newest configurations used."""


@lru_cache(maxsize=16)
def fitted_rates(runs: tuple[Observation, ...]) -> "tuple[dict[str, float], Correction] | None":
    """Return seconds per unit by kind of work, fitted to runs, None with too few or without a fit.

    A kind without an effect has 0 seconds. The second value corrects predictions by these rates.
    """
    newest = runs[-_MAX_CALIBRATION_RUNS:]
    if len(newest) < MIN_CALIBRATION_RUNS:
        return None
    # Imported here, since it imports numpy, which a plan without runs does not need.
    from eke.estimate.time.rate_regression import correction_of, solve

    kinds = sorted({kind for run in newest for kind, amount in run.amounts.items() if amount > 0})
    table = [[run.amounts.get(kind, 0.0) for kind in kinds] for run in newest]
    best = solve(table, [run.measured for run in newest])
    if best is None:
        return None
    seconds = {kind: best.seconds.get(column, 0.0) for column, kind in enumerate(kinds)}
    return seconds, correction_of([1 / ratio for ratio in best.left_out])


_BEYOND = 4.0
"""Largest FLOPs, bytes or launches relative to those of finished runs: a choice."""

_WIDEST = 10.0
"""Factor either way beyond which fitted rates give no estimate: a choice."""

_PART_OF = {"moved": "memory", "launches": "host"}
"""Part of a step by kind of work. The rest is compute."""


def forecast_time(plan: Plan) -> StepTime | Unknown:
    """Return the expected time of an optimizer step and of the run, without torch.

    Uses the device's datasheet, corrected by finished runs on such a device with these libraries
    if there are at least five. Without a datasheet, only those runs are used.
    """
    group = time_group(plan)
    runs, work = read_observations(group), Work(plan)
    versions = ", ".join(f"{n} {group[n]}" for n in ("torch", "transformers") if n in group)
    found = calibrated_step_time(plan, work)
    if isinstance(found, Unknown):
        return _time_by_runs(plan, work, runs, versions)
    corrected = [run for run in runs if run.predicted > 0]
    ratios = [run.measured / run.predicted for run in corrected]
    if len(ratios) < MIN_CALIBRATION_RUNS:
        return replace(
            found, calibrated=CalibratedStep(len(runs), MIN_CALIBRATION_RUNS, versions=versions)
        )
    if beyond := _amount_beyond_runs(amounts_of(plan, work), corrected):
        return replace(found, notes=(*found.notes, f"not corrected: {beyond}"))
    from eke.estimate.time.rate_regression import correction_of  # late, as above

    by = correction_of(ratios)
    found = calibrated_step_time(plan, work, _span_of_width(by.within) * by.factor)
    assert isinstance(found, StepTime)
    return replace(found, calibrated=_calibrated(len(ratios), by, versions))


def _amount_beyond_runs(amounts: Mapping[str, float], runs: Sequence[Observation]) -> str:
    """Return which amount of a step's work is far above all finished runs, "" if none is."""
    ratios = {
        kind: amount / (max(run.amounts.get(kind, 0.0) for run in runs) or inf)
        for kind, amount in amounts.items()
    }
    kind = max(ratios, key=lambda each: ratios[each])
    if ratios[kind] <= _BEYOND:
        return ""
    name = {"moved": "bytes moved", "launches": "kernel launches"}.get(kind, "FLOPs")
    return f"its {name} are {ratios[kind]:,.0f} times the most in {len(runs)} finished runs here"


def _calibrated(num_runs: int, by: "Correction", versions: str) -> CalibratedStep:
    return CalibratedStep(num_runs, MIN_CALIBRATION_RUNS, by.factor, expm1(by.within), versions)


def _span_of_width(within: float) -> Span:
    """Return the factors of an interval with this half width, a natural logarithm."""
    return Span(exp(-within), 1.0, exp(within))


def _time_by_runs(
    plan: Plan, work: Work, runs: tuple[Observation, ...], versions: str
) -> StepTime | Unknown:
    """Return the time by rates of finished runs, Unknown if they do not determine it."""
    rates = fitted_rates(runs)
    if rates is None:
        return Unknown(f"{why_unknown(plan)} ({len(runs)} so far with these libraries)")
    unit_s, by = rates
    measured = [run.measured for run in runs[-_MAX_CALIBRATION_RUNS:]]
    if by.within > log(_WIDEST):
        why = f"timings of {len(measured)} finished runs here differ by more than {_WIDEST:.0f}x"
        return Unknown(f"{why}. Rerun on an idle machine")
    amounts = amounts_of(plan, work)
    unseen = [kind for kind, amount in amounts.items() if amount and kind not in unit_s]
    if unseen:
        return Unknown(f"needs a finished run in {unseen[0]} here")
    if beyond := _amount_beyond_runs(amounts, runs[-_MAX_CALIBRATION_RUNS:]):
        return Unknown(f"{beyond}. Needs a finished run of about this size")
    seconds = {kind: amount * unit_s.get(kind, 0.0) for kind, amount in amounts.items()}
    expected = sum(seconds.values()) * by.factor
    if expected <= 0:
        return Unknown(why_unknown(plan))
    parts = {_PART_OF.get(kind, "compute"): each * by.factor for kind, each in seconds.items()}
    step, basis = _span_of_width(by.within) * expected, "finished runs on this device"
    found = describe_step(plan, work, step, parts, basis, None)
    return replace(found, calibrated=_calibrated(len(measured), by, versions))


def slowdown(now: Plan, changed: Plan) -> tuple[float, str] | None:
    """Return the expected time per sample relative to now and its source, None if unknown."""
    before, after = forecast_time(now), forecast_time(changed)
    runs = min(num_runs(before), num_runs(after))
    if not runs:  # correcting one side only would look like a difference in speed
        before, after = calibrated_step_time(now), calibrated_step_time(changed)
    if not (isinstance(before, StepTime) and isinstance(after, StepTime)):
        return None
    known = f"calibrated by {runs} runs on it" if runs else "not calibrated"
    source = f"the time model's estimate for this device, {known} (docs/how-to/forecast.md)"
    return before.samples_per_s.expected / after.samples_per_s.expected, source


def num_runs(found: StepTime | Unknown) -> int:
    """Return the number of finished runs behind an estimate, 0 for datasheets only."""
    by = None if isinstance(found, Unknown) else found.calibrated
    return by.runs if by is not None and by.factor is not None else 0


def predicted_step(found: StepTime) -> PredictedStep:
    """Return an estimate in the record's form."""
    return PredictedStep(
        **asdict(found.step_s),
        parts=dict(found.parts),
        limit=found.limit,
        basis=found.basis,
        notes=list(found.notes),
        calibrated=found.calibrated,
    )


def step_time_json(found: StepTime | Unknown) -> dict[str, Any]:
    """Return an estimate under the record's field paths: `timing.predicted_step_s.low`."""
    if isinstance(found, Unknown):
        return {"timing": {"predicted_step_s": None, "unknown": found.reason}}
    return {
        "timing": {
            "predicted_step_s": asdict(predicted_step(found)),
            "predicted_train_s": asdict(found.total_s),
            "predicted_device_hours": asdict(found.gpu_hours),
        },
        "throughput": {
            "predicted_samples_per_s": asdict(found.samples_per_s),
            "predicted_tokens_per_s": asdict(found.tokens_per_s),
            "predicted_mfu_frac": asdict(found.mfu) if found.mfu else None,
        },
    }
