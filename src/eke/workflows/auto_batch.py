"""batch=auto: which micro-batches there are, which of them is taken, and what is said about it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from eke.common.errors import ConfigError, Problem
from eke.common.units import format_bytes
from eke.config.schema import DEFAULT_PER_DEVICE, Config
from eke.estimate.memory import (
    Chosen,
    Forecast,
    Method,
    Probe,
    Search,
    Verdict,
    note_choice,
    refuse_what_ran_out,
    reserve_of,
    room_for_a_batch,
)
from eke.estimate.time import slowdown
from eke.plan.planner import Decision, Plan, possible_batches, replan, samples_to_keep, with_batch
from eke.rules import BY_SIZE, Facts, check


@dataclass(frozen=True)
class Means:
    """What may be spent on the choice."""

    trace: bool = False
    """Seconds on traces where formulas cannot tell."""
    probe: Probe | None = None
    """Tries a plan out."""
    not_probed: str = "nothing runs while planning"
    """Why there is no probe."""
    in_pool: bool = False
    """Other runs of a sweep may use the device, or a CPU's memory, at the same time."""
    keep: bool = False
    """The run is to start: its choice is the one for all commands like it."""


@dataclass(frozen=True)
class Permitted:
    """A configuration that no rule refuses."""

    config: Config
    warnings: tuple[str, ...]


def permitted(facts: Facts, lenient: bool) -> list[Permitted]:
    """The configuration, or with batch=auto each of its micro-batches, that no rule refuses.

    Args:
        facts: the configuration and its device.
        lenient: whether rules about its size are left to the forecast.

    Raises:
        ConfigError: every rule it breaks.
    """
    refused, found = _checked(facts, lenient)
    if facts.config.batch.per_device is not None:
        if refused:
            raise ConfigError(refused)
        return [found]
    if any(problem.path.startswith("batch.") for problem in refused):
        raise ConfigError(refused)  # about what is to be kept, or one sample is too large
    tried = [
        _checked(replace(facts, config=each), lenient) for each in possible_batches(facts.config)
    ]
    allowed = [each for refused, each in tried if not refused]
    if not allowed:
        raise ConfigError(min((refused for refused, _ in tried), key=len))
    return allowed


def _checked(facts: Facts, lenient: bool) -> tuple[list[Problem], Permitted]:
    refused, warned = check(facts)
    if lenient:
        refused = [problem for problem in refused if problem.rule not in BY_SIZE]
    warnings = tuple(f"{p.path} = {p.value}: {p.why} ({p.fix})" for p in warned)
    return refused, Permitted(facts.config, warnings)


def sharing(plan: Plan) -> int:
    """Runs of a sweep that use the same device, or a CPU's memory, at the same time."""
    launcher = plan.config.launcher
    if plan.device.kind != "cpu":
        return launcher.runs_per_device
    return max(1, launcher.cpu_slots // plan.batch.world_size)


def at_rest(plan: Plan) -> Plan:
    """The same where nobody else holds anything of a CPU's memory."""
    return replace(plan, device=replace(plan.device, available_bytes=None))


def memory_asked_for(plan: Plan) -> int | None:
    """Bytes for tensors of the host memory that a cluster is asked for; None where that is open."""
    asked = plan.config.resources.memory
    if asked is None or plan.device.kind != "cpu" or plan.device.memory_bytes is not None:
        return None
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", asked.upper())
    if found is None:
        return None  # told when it is asked for
    per_node = int(found[1]) * 1024 ** (" KMGT".index(found[2] or "M"))  # sbatch: megabytes
    return room_for_a_batch(replace(plan, device=replace(plan.device, memory_bytes=per_node)))


def choose_batch(
    plan: Plan, allowed: Sequence[Permitted], means: Means, target_given: bool
) -> tuple[Plan, bool]:
    """The plan with the largest micro-batch that fits.

    Args:
        plan: with the first of the configurations.
        allowed: the same configuration with each micro-batch, the smallest first.
        means: what may be spent.
        target_given: somebody has said how many samples a step has.

    Returns:
        The plan, and whether it was seen to fit, so that no forecast need warn.

    Raises:
        ConfigError: the device's memory is not known, or not even the smallest one fits.
    """
    share = sharing(plan) if means.in_pool else 1
    if share > 1:
        means = replace(means, probe=None, not_probed="runs of this sweep share its device")
    capacity = room_for_a_batch(plan, share)
    if capacity is None:
        capacity = memory_asked_for(plan)
    if capacity is None:
        why = f"needs to know the memory of {plan.device.name}, which nobody has said"
        fix = f"batch=fixed batch.per_device={DEFAULT_PER_DEVICE}"
        if plan.device.kind == "cpu":
            fix = f"resources.memory=64G   (or {fix})"
        raise ConfigError(Problem("batch", "auto", why, fix))
    plans = [replan(plan, each.config) for each in allowed]
    whole = room_for_a_batch(at_rest(plan), share)
    search = Search(plans, capacity, means.trace, means.probe, whole)
    chosen = search.run()
    taken = allowed[chosen.number]
    reasons = _reasons(plan, chosen, plans, capacity, means)
    if not target_given:
        why = "as many samples per step as batch=fixed has"
        reasons.insert(0, Decision("batch.target", str(samples_to_keep(plan.config)), why))
    cut = with_batch(plan, taken.config, reasons, taken.warnings)
    if chosen.fails:
        refuse_what_ran_out(cut, chosen.forecast, slowdown)
    if chosen.fits and means.keep:
        note_choice(search.key, cut.batch.samples_per_step, cut.batch.per_device)
    return cut, chosen.how == "probed"


def _reasons(
    plan: Plan, chosen: Chosen, plans: Sequence[Plan], capacity: int, means: Means
) -> list[Decision]:
    """The micro-batch with its reason."""
    size, target = plans[chosen.number].batch.per_device, samples_to_keep(plan.config)
    kept = f"with batch.target={target} kept"
    if not chosen.fits:
        enough = chosen.forecast.best.high <= capacity + reserve_of(plan)
        left = f"fits, but leaves less than {format_bytes(reserve_of(plan))} to others"
        tight = "does not" if chosen.forecast.verdict is Verdict.does_not_fit else "may not"
        what = f"smallest {kept}, and {left if enough else f'{tight} fit'}"
    elif chosen.larger is None:
        what = f"all of batch.target={target} at once fits"
    else:
        what = f"largest that fits {kept}"
    words = [f"auto: {what}: {_expected(plan, chosen, capacity)}"]
    if chosen.how != "predicted":
        words.append("tried out" if chosen.how == "probed" else "as decided before")
    if chosen.larger is not None:
        words.append(_of_larger(chosen, plans[chosen.number + 1].batch.per_device, means))
    return [Decision("batch.per_device", str(size), "; ".join(words))]


def _expected(plan: Plan, chosen: Chosen, capacity: int) -> str:
    how = "" if chosen.forecast.method is not Method.closed_form else " by formulas"
    how += _why_not_traced(chosen.forecast)
    by = chosen.forecast.calibrated
    if by is not None and by.peak is not None:
        how += f", calibrated by {by.num_runs} runs,"
    reserve = reserve_of(plan)
    whose = f" for tensors, {format_bytes(reserve)} of it for others" if reserve else ""
    peak = format_bytes(chosen.forecast.best.expected)
    return f"{peak} expected{how} of {format_bytes(capacity + reserve)}{whose}"


def _of_larger(chosen: Chosen, size: int, means: Means) -> str:
    """What is known of the next larger micro-batch."""
    assert chosen.larger is not None
    peak = chosen.larger.best
    if chosen.larger_failed:
        return f"{size} ran out of memory when it was tried out"
    if not chosen.larger_is_open or chosen.how == "as before":
        return f"{size} would need {format_bytes(peak.expected)}"
    between = f"{format_bytes(peak.low)} to {format_bytes(peak.high)}"
    between += _why_not_traced(chosen.larger)
    why = "" if means.probe is not None else f": {means.not_probed}"
    return f"{size} would need {between}, and was not tried out{why}"


def _why_not_traced(found: Forecast) -> str:
    """A trace that failed is said: what formulas leave open, it might have settled."""
    return f" (not traced: {found.not_traced})" if found.not_traced else ""
