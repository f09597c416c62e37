"""The rule `does_not_fit`: reject plans that cannot fit by any bound."""

from dataclasses import replace
from typing import Any

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import format_bytes
from eke.estimate.memory import Forecast, Method, Verdict, least_host_bytes
from eke.estimate.memory.predict_memory import available_bytes
from eke.estimate.memory.render_memory import host_budget
from eke.plan.planner import Plan
from eke.tuning.memory_advice import Advice, advise

DOES_NOT_FIT = "does_not_fit"
"""Id of the rule. Its condition needs a plan, so it is not in `eke.rules.RULES`."""

_found: dict[Any, Advice | None] = {}
"""Advice by forecast and options, shared by the jobs of a sweep that need the same memory."""


def reject_unfit_plan(plan: Plan, found: Forecast) -> str:
    """Return a warning if the plan may not fit, else "". Raise ConfigError if it cannot fit."""
    _reject_host(plan, found)
    if found.verdict in (Verdict.unknown, Verdict.fits):
        return ""
    if cannot_fit(plan, found):
        peak, at_rest = found.peak, replace(plan.device, available_bytes=None)
        why = f"needs at least {format_bytes(peak.low)} of memory, "
        why += f"{format_bytes(peak.expected)} expected"
        # It would fit if other processes held no memory.
        passing = peak.low <= (available_bytes(replace(plan, device=at_rest)) or 0)
        raise ConfigError(_problem(plan, found, why, passing))
    if found.verdict is Verdict.tight and found.method is Method.closed_form:
        # Formulas are wide: only warn if it is more likely not to fit.
        return ""
    expected = f"memory: {format_bytes(found.peak.expected)} expected"
    return f"{expected}, {_has(plan, found)} ({_fix(plan, found)})"


def _reject_host(plan: Plan, found: Forecast) -> None:
    """Reject a plan that needs more host memory than the node has, also for checkpoint copies."""
    has, alone = plan.device.host_memory_bytes, least_host_bytes(plan, found, copies=False)
    if plan.config.ignore_forecast or not has or least_host_bytes(plan, found) <= has:
        return
    typed = "train.checkpoint_async=false" if alone <= has else "offload=none"
    why = f"host memory of a node: {host_budget(plan, found)}, {format_bytes(alone)} without copies"
    fix = Fix(typed, remark="ignore_forecast=true starts it anyway")
    raise ConfigError(Problem(typed.partition("=")[0], "", why, fix, "host_memory"))


def cannot_fit(plan: Plan, found: Forecast) -> bool:
    """Return whether a plan cannot fit by any bound, unless the user forces it."""
    if (
        found.capacity is None
        or found.verdict in (Verdict.unknown, Verdict.fits)
        or plan.config.ignore_forecast
    ):
        return False
    return found.peak.low > found.capacity


def reject_probed_oom(plan: Plan, found: Forecast) -> None:
    """Reject a plan that ran out of memory in a probe, unless the user forces it."""
    if plan.config.ignore_forecast:
        return
    why = f"ran out of memory in a probe, {format_bytes(found.peak.expected)} expected"
    raise ConfigError(_problem(plan, found, why, passing=False))


def _problem(plan: Plan, found: Forecast, why: str, passing: bool) -> Problem:
    fix = _fix(plan, found, "ignore_forecast=true starts it anyway")
    size, why = str(plan.batch.per_device), f"{why} ({_has(plan, found)})"
    return Problem("batch.per_device", size, why, fix, DOES_NOT_FIT, passing)


def _has(plan: Plan, found: Forecast) -> str:
    capacity, left = format_bytes(found.capacity or 0), plan.device.available_bytes
    whole = format_bytes(plan.device.memory_bytes or 0)
    taken = "" if left is None else f", {format_bytes(left)} of it free now"
    if plan.device.kind != "cpu":
        return f"{plan.device.name} has {whole}{taken}"
    many = plan.processes_per_node
    each = f" of each of {many} processes" if many > 1 else ""
    return f"this machine has {whole}{taken}: {capacity} for tensors{each}"


def first_memory_advice(plan: Plan, found: Forecast) -> Advice | None:
    """Return the first advice for a plan that does not fit, cached for similar plans."""
    key = (found.peak, found.capacity, plan.batch, tuple(sorted(plan.choices.items())))
    if key not in _found:
        _found[key] = next(iter(advise(plan, 1, other_devices=False)), None)
    return _found[key]


def _fix(plan: Plan, found: Forecast, remark: str = "") -> Fix:
    advice = first_memory_advice(plan, found)
    if advice:
        return Fix(*advice.overrides, remark=remark)
    explain = "largest components: eke plan --why"
    return Fix(remark=f"{explain}, {remark}" if remark else explain)
