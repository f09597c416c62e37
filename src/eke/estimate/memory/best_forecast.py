"""The best that can be said of a plan's memory: formulas, or a trace that is kept or made now."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from eke.estimate.memory import cache
from eke.estimate.memory import trace_client as ask
from eke.estimate.memory.calibration import calibrate
from eke.estimate.memory.history_store import versions_of
from eke.estimate.memory.memory_history import group_of, read_pairs
from eke.estimate.memory.predict import forecast, verdict
from eke.estimate.memory.values import Forecast, Method
from eke.plan.planner import Plan


def known_forecast(plan: Plan) -> Forecast:
    """By a trace that is kept, else by formulas; nothing is started."""
    return calibrated(plan, forecast(plan, cache.find(cache.key_of(plan))))


def traced_forecast(plan: Plan) -> Forecast:
    """By a trace, made now unless it is kept; by formulas, with the reason, where there is none."""
    return _with(plan, ask.traced(plan))


def traced_forecasts(
    plans: Sequence[Plan], progress: Callable[[int, int], Any], processes: int
) -> list[Forecast]:
    """The same for many plans at once, each trace made once.

    Args:
        plans: of a sweep.
        progress: told how many of how many have theirs; called from any thread.
        processes: that trace at the same time.
    """
    answers = ask.trace_all(plans, progress, processes)
    return [_with(plan, answer) for plan, answer in zip(plans, answers, strict=True)]


def calibrated(plan: Plan, found: Forecast) -> Forecast:
    """A forecast and what finished runs of its group add to it; the verdict is of both.

    Args:
        plan: of the run.
        found: its forecast, not calibrated yet.
    """
    group = group_of(plan, found.method.value)
    better = calibrate(found, read_pairs(group), versions_of(group))
    return replace(better, verdict=verdict(better.best, better.capacity))


def is_open(found: Forecast) -> bool:
    """Whether formulas cannot tell if there is room, so that a trace is worth its seconds."""
    if found.method is not Method.closed_form or found.capacity is None:
        return False
    return found.peak.low <= found.capacity < found.peak.high


def _with(plan: Plan, answer: ask.Answer) -> Forecast:
    found = forecast(plan, answer.traced)
    if answer.traced is None:
        found = replace(found, not_traced=answer.reason)
    return calibrated(plan, found)
