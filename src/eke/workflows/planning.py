"""Plan one composed configuration for a device."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.process_env import is_first, machines_at_hand, ranks_are_started
from eke.common.text import format_bytes
from eke.config.compose import Composed, is_set
from eke.config.schema import Config, resolve_attention
from eke.estimate.memory import (
    Forecast,
    ProbeResult,
    is_open,
    known_forecast,
    stop_tracing,
    traced_forecast,
)
from eke.hardware import Device, choose_device
from eke.models.checkpoints import follow_head, resolve_model, resolve_tokenizer
from eke.plan.planner import Decision, Plan, make_plan
from eke.plan.planner.samples import plan_data
from eke.rules import BY_SIZE, NOT_BY_SIZE, Facts, check
from eke.tuning.refuse_oom import refuse_what_cannot_fit, what_makes_room
from eke.workflows import print_once
from eke.workflows.auto_batch import (
    Means,
    Permitted,
    adapted,
    at_rest,
    choose_batch,
    fine_tuned,
    permitted,
)

if TYPE_CHECKING:
    from eke.launch.interface import Launcher

PLANNING = Means()
"""Budget of batch=auto if no run starts."""


def plan_for(
    composed: Composed,
    planning: bool,
    launcher: "Launcher | None" = None,
    refuse: bool | None = None,
    trace: bool = True,
    means: Means = PLANNING,
) -> Plan:
    """Check and plan one configuration.

    Args:
        composed: the requested configuration.
        planning: nothing will be run.
        launcher: starts the run; None for a single run on this machine.
        refuse: reject what cannot fit into memory; None: only if it will run.
        trace: spend seconds on a trace where formulas cannot tell whether there is room.
        means: budget of batch=auto.

    Raises:
        ConfigError: every rule it breaks.
    """
    if launcher is None:
        device, reason = choose_device(composed.config.hardware.option)
        num_nodes = machines_at_hand()
    else:
        device, reason, num_nodes = launcher.target(composed.config)
    return plan_on(composed, device, reason, planning, refuse, num_nodes, trace, means)


def plan_on(
    composed: Composed,
    device: Device,
    reason: str,
    planning: bool,
    refuse: bool | None = None,
    num_nodes: int = 1,
    trace: bool = True,
    means: Means = PLANNING,
) -> Plan:
    """Check and plan one configuration for a device; arguments and errors as of `plan_for`."""
    needed = composed.config.distributed.processes_per_node
    if not device.present and device.kind == "cuda" and needed > device.count:
        # How many there are is not declared, and the plan is about one of them.
        device = replace(device, count=needed)
        reason = f"{needed} of them taken for granted; {reason}"
    config = resolve_attention(resolve_model(composed.config, composed.overrides, planning))
    choices = {**composed.choices, "attention": config.attention.option}
    composed = replace(composed, choices=choices)
    if not is_set(composed, "task.num_labels"):
        config = follow_head(config)

    def count(config: Config) -> int:
        refused, _ = check(Facts(config, device, planning, num_nodes), NOT_BY_SIZE)
        return 0 if refused else plan_data(config, []).train  # what is refused is reported later

    config, first, _ = fine_tuned(resolve_tokenizer(config), composed, count)
    recipe = adapted(composed, config, device, num_nodes)
    # Once more, since a recipe may have chosen another optimizer.
    config, again, remark = fine_tuned(recipe.config, composed, count)
    usual = {decision.key: decision for decision in (*first, *again)}
    refuse = not planning if refuse is None else refuse
    # The forecast shows it, in more detail; or the user knows.
    lenient = not refuse or config.ignore_forecast
    facts = Facts(config, device, planning, num_nodes, partial(is_set, composed))

    def plan_of(each: Permitted) -> Plan:
        made = make_plan(
            each.config, recipe.choices, composed.overrides, device, reason, each.warnings
        )
        return replace(made, config_dir=str(composed.config_dir or ""))

    allowed = _allowed(facts, lenient, plan_of)
    plan, seen_to_fit = plan_of(allowed[0]), False
    if config.batch.per_device is None:
        plan, seen_to_fit = choose_batch(plan, allowed, means, config.batch.target is not None)
    about_device, *others = plan.decisions
    plan = replace(plan, decisions=(about_device, *recipe.decisions, *others))
    plan = _explained(plan, usual, remark)
    if means.in_pool:  # its turn comes when others have ended
        plan = at_rest(plan)
    return weighed(plan, trace) if refuse and not seen_to_fit else plan


def _explained(plan: Plan, usual: dict[str, Decision], remark: str) -> Plan:
    """The plan with what fine-tuning usually takes, and why."""
    decisions = tuple(
        replace(each, reason=f"{usual.pop(each.key).reason}; {each.reason}")
        if each.key in usual
        else each
        for each in plan.decisions
    )
    warnings = (*plan.warnings, remark) if remark else plan.warnings
    return replace(plan, decisions=(*decisions, *usual.values()), warnings=warnings)


def _allowed(facts: Facts, lenient: bool, plan_of: Callable[[Permitted], Plan]) -> list[Permitted]:
    """As `permitted`; if only its size is rejected, the error proposes a sufficient reduction."""
    try:
        return permitted(facts, lenient)
    except ConfigError as error:
        if any(problem.id not in BY_SIZE for problem in error.problems):
            raise
        try:
            smallest = plan_of(permitted(facts, lenient=True)[0])
        except ConfigError:  # another problem exists too: report the rule's first
            raise error from None
        raise ConfigError([_with_room(each, smallest) for each in error.problems]) from None


def _with_room(problem: Problem, plan: Plan) -> Problem:
    """A rule's problem about a lower bound, with an override that suffices for the whole run."""
    advice = what_makes_room(plan, known_forecast(plan))
    if advice is None or check(Facts(advice.plan.config, plan.device, planning=True))[0]:
        return problem
    remark = f"{format_bytes(advice.forecast.peak.expected)} expected"
    if not advice.keeps:
        remark += ", another training"
    return replace(problem, fix=Fix(*advice.overrides, remark=remark))


def weighed(plan: Plan, trace: bool = True, found: Forecast | None = None) -> Plan:
    """The plan, with a warning where memory is short; raises ConfigError if it cannot fit."""
    found = found or known_forecast(plan)
    if trace and is_open(found):
        found = traced_forecast(plan)
    warning = refuse_what_cannot_fit(plan, found)
    return replace(plan, warnings=(*plan.warnings, warning)) if warning else plan


def means_of_a_run(config: Config) -> Means:
    """Budget of a single run that starts on this machine.

    Externally started processes each make the plan and must agree.
    """
    if ranks_are_started():
        why = "processes that another launcher has started are not tried out"
        return Means(not_probed=why, keep=is_first())
    if config.distributed.num_nodes > 1:
        return Means(trace=True, not_probed="it has several machines", keep=True)
    return Means(trace=True, probe=probe_aloud, keep=True)


def means_of_a_cell(config: Config, launcher: "Launcher") -> Means:
    """Budget of a sweep's run, before the first one starts."""
    if config.plan_only:
        return Means(in_pool=not launcher.not_probed)
    if launcher.not_probed:
        return Means(trace=True, not_probed=launcher.not_probed, keep=True)
    return Means(trace=True, probe=partial(probe_aloud, in_pool=True), in_pool=True, keep=True)


def probe_aloud(plan: Plan, in_pool: bool = False) -> ProbeResult:
    """Try a plan out on this machine, and say so; in a pool, if its devices are free."""
    from eke.launch.local import probe_in_pool
    from eke.launch.processes.running_run import probe  # a plan starts nothing

    size = plan.batch.per_device
    stop_tracing()
    print_once(f"  probing batch.per_device={size}: two steps, to see whether they fit into memory")
    found = probe_in_pool(plan) if in_pool else probe(plan)
    if found.fits is None:
        print_once(f"  the probe says nothing: {found.reason}")
        return ProbeResult.unknown
    print_once(
        f"  batch.per_device={size} {'fits' if found.fits else f'does not fit: {found.reason}'}"
    )
    return ProbeResult.fits if found.fits else ProbeResult.fails
