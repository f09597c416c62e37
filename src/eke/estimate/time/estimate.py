"""The best there is to say of a step's time: a prior that runs have corrected, or their rates."""

from dataclasses import replace
from math import exp, expm1, log

from eke.estimate.memory.history_store import versions_of
from eke.estimate.time.fit_rates import NEEDED, FittedRates, as_table, correction, fitted_rates
from eke.estimate.time.predict import describe, prior_time, why_unknown
from eke.estimate.time.time_history import Observation, amounts_of, group_of, read_observations
from eke.estimate.time.values import PaceCalibration, Span, StepTime, Unknown
from eke.estimate.time.work import Work, work_of
from eke.plan.planner import Plan

FAR = 10.0
"""Times the longest step seen, or below the shortest: said, since nothing was measured there."""

WIDEST = 10.0
"""Factor either way beyond which an interval of fitted rates is no answer: a choice."""

PART_OF = {"moved": "memory", "launches": "host"}
"""Kind of work -> the part of a step it is shown as; any other is compute."""


def forecast_time(plan: Plan) -> StepTime | Unknown:
    """Expected time of an optimizer step and of the whole run: an estimate, no torch, milliseconds.

    By the device's datasheet where there is one, corrected by finished runs on such a device with
    these libraries where there are five or more; without a datasheet by those runs alone.

    Args:
        plan: of the run.
    """
    group = group_of(plan)
    runs = read_observations(group)
    work = work_of(plan)
    prior = prior_time(plan, work)
    if isinstance(prior, Unknown):
        return _by_runs(plan, work, runs, versions_of(group))
    return _corrected(prior, runs, versions_of(group))


def _corrected(prior: StepTime, runs: tuple[Observation, ...], versions: str) -> StepTime:
    """A prior, with the bias and the interval of the runs of its group."""
    found = correction(runs)
    if found is None:
        return replace(prior, calibrated=PaceCalibration(len(runs), NEEDED, versions=versions))
    expected = prior.step_s.expected * found.factor
    step = Span(expected * exp(-found.within), expected, expected * exp(found.within))
    better = _with_step(prior, step, found.factor)
    by = PaceCalibration(found.num_runs, NEEDED, found.factor, expm1(found.within), versions)
    return replace(better, calibrated=by)


def _with_step(found: StepTime, step: Span, factor: float) -> StepTime:
    """The same work at another pace."""
    samples = found.samples_per_s.expected * found.step_s.expected
    tokens = found.tokens_per_s.expected * found.step_s.expected
    steps = found.total_s.expected / found.step_s.expected
    whole = step * steps
    mfu = found.mfu and step.inverse(found.mfu.expected * found.step_s.expected)
    return replace(
        found,
        step_s=step,
        samples_per_s=step.inverse(samples),
        tokens_per_s=step.inverse(tokens),
        parts={name: seconds * factor for name, seconds in found.parts.items()},
        mfu=mfu,
        total_s=whole,
        gpu_hours=whole * (found.num_devices / 3600),
    )


def _by_runs(
    plan: Plan, work: Work, runs: tuple[Observation, ...], versions: str
) -> StepTime | Unknown:
    """Time by rates that runs have shown; unknown where they have not."""
    rates = fitted_rates(as_table(runs))
    if rates is None:
        return Unknown(f"{why_unknown(plan)} ({len(runs)} so far with these libraries)")
    if rates.within > log(WIDEST):
        why = f"the {rates.num_runs} finished runs here contradict each other by more than a factor"
        return Unknown(f"{why} of {WIDEST:.0f}: more of them would tell, on a quieter machine")
    amounts = amounts_of(plan, work)
    unseen = [kind for kind, amount in amounts.items() if amount and kind not in rates.seen]
    if unseen:
        return Unknown(f"no run in {unseen[0]} has finished here yet: one would tell")
    seconds = {kind: amount * rates.seconds.get(kind, 0.0) for kind, amount in amounts.items()}
    expected = sum(seconds.values()) * rates.factor
    if expected <= 0:
        return Unknown(why_unknown(plan))
    spread = Span(exp(-rates.within), 1.0, exp(rates.within))
    step = spread * expected
    parts: dict[str, float] = {}
    for kind, each in seconds.items():
        part = PART_OF.get(kind, "compute")
        parts[part] = parts.get(part, 0.0) + each * rates.factor
    found = describe(plan, work, step, parts, "finished runs on this device", None)
    by = PaceCalibration(rates.num_runs, NEEDED, rates.factor, expm1(rates.within), versions)
    return replace(found, calibrated=by, notes=(*found.notes, *_far(expected, rates)))


def _far(expected: float, rates: FittedRates) -> tuple[str, ...]:
    """A warning where the answer lies far from everything measured."""
    if rates.smallest / FAR <= expected <= rates.largest * FAR:
        return ()
    return ("far from the runs that rates are known from: less sure than the range says",)


__all__ = ["forecast_time"]
