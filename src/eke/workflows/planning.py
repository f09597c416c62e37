"""Plan one composed configuration for a device, and show its forecast, advice or all devices."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.process_env import is_first, machines_at_hand, ranks_are_started
from eke.common.text import format_bytes
from eke.config.compose import Arguments, Composed, compose, is_set
from eke.config.schema import Config, Tracker, resolve_attention
from eke.estimate.memory import (
    Forecast,
    OnDevice,
    as_json,
    is_open,
    known_forecast,
    largest_batch,
    render_devices,
    render_forecast,
    stop_tracing,
    traced_forecast,
    traced_forecasts,
)
from eke.estimate.time import forecast_time, num_runs, render_time, speed_cell, table_notes
from eke.estimate.time import step_time_json as time_as_json
from eke.hardware import DEVICES, Device, choose_device, usable_cores
from eke.models.checkpoints import follow_head, resolve_model, resolve_tokenizer
from eke.plan.planner import Decision, Plan, make_plan, plan_to_plain, render_plan, samples_to_keep
from eke.plan.planner.samples import plan_data
from eke.results.report import PlanningLine
from eke.rules import BY_SIZE, NOT_BY_SIZE, Facts, check
from eke.tuning.advice import Advice, advise, render_advice
from eke.tuning.chooser import ROOM
from eke.tuning.refuse_oom import refuse_what_cannot_fit, what_makes_room
from eke.workflows import ALL_DEVICES, print_once
from eke.workflows.auto_batch import (
    Means,
    Permitted,
    adapted,
    at_rest,
    choose_batch,
    fine_tuned,
    permitted,
)
from eke.workflows.resume import continued

if TYPE_CHECKING:
    from eke.launch.interface import Launcher

Key = TypeVar("Key", int, str)
SIZE = "batch.per_device"

SWITCHED_OFF = {"WANDB_MODE": ("disabled",), "WANDB_DISABLED": ("1", "true", "yes", "on")}
"""Variable -> its values that switch W&B off; transformers reads the older one, too."""

PLANNING = Means()
"""Budget of batch=auto if no run starts."""


def plan_for(composed: Composed, planning: bool, **how: Any) -> Plan:
    """As `_plan_for`; an unset batch.per_device is no larger than the samples, with a warning."""
    try:
        return _plan_for(composed, planning, **how)
    except ConfigError as error:
        size = _smaller_batch(composed, error)
        if size is None:
            raise
    batch = replace(composed.config.batch, per_device=size)
    fewer = replace(composed, config=replace(composed.config, batch=batch))
    plan = _plan_for(fewer, planning, **how)
    few = f"{SIZE}={size}: only {plan.steps.num_train_samples} samples to train on"
    return replace(plan, warnings=(*plan.warnings, few))


def _smaller_batch(composed: Composed, error: ConfigError) -> int | None:
    """The batch.per_device that an error about the data proposes, where none is set."""
    if composed.choices["batch"] != "fixed" or is_set(composed, SIZE):
        return None
    # Problems of rules have an id.
    words = [p.fix.words for p in error.problems if (p.key, p.id) == (SIZE, "")]
    if len(words) != 1 or len(words[0]) != 1:
        return None
    key, _, size = words[0][0].partition("=")
    return int(size) if key == SIZE else None


def _plan_for(
    composed: Composed,
    planning: bool,
    launcher: "Launcher | None" = None,
    refuse: bool | None = None,
    trace: bool = True,
    means: Means = PLANNING,
    target: tuple[Device, str, int] | None = None,
) -> Plan:
    """Check and plan one configuration; ConfigError with every rule it breaks.

    Args:
        composed: the requested configuration.
        planning: nothing will be run.
        launcher: starts the run; None for a single run on this machine.
        refuse: reject what cannot fit into memory; None: only if it will run.
        trace: spend seconds on a trace where formulas cannot tell whether there is room.
        means: budget of batch=auto.
        target: device, why it is that one, and number of machines; None: the launcher's.
    """
    device, reason, num_nodes = target or _target(composed.config, launcher)
    needed = composed.config.distributed.processes_per_node
    device, reason = _with_enough(device, reason, needed)
    config = resolve_attention(resolve_model(composed.config, composed.overrides, planning))
    attention = {"attention": config.attention.option}
    composed = replace(composed, choices={**composed.choices, **attention})
    if not is_set(composed, "task.num_labels"):
        config = follow_head(config)

    def count(config: Config) -> int:
        refused, _ = check(Facts(config, device, planning, num_nodes), NOT_BY_SIZE)
        return 0 if refused else plan_data(config, []).train  # what is refused is reported later

    config, first, _ = fine_tuned(resolve_tokenizer(config), composed, count)
    config, choices, chosen = adapted(composed, config, device, num_nodes)
    # Once more, since a recipe may have chosen another optimizer.
    config, again, remark = fine_tuned(config, composed, count)
    if off := switched_off_tracker(composed):
        config, choices = replace(config, tracker=Tracker("none")), {**choices, "tracker": "none"}
    usual = {decision.key: decision for decision in (*first, *again)}
    refuse = not planning if refuse is None else refuse
    # The forecast shows it, in more detail; or the user knows.
    lenient = not refuse or config.ignore_forecast
    facts = Facts(config, device, planning, num_nodes, partial(is_set, composed))

    def plan_of(each: Permitted) -> Plan:
        made = make_plan(each.config, choices, composed.overrides, device, reason, each.warnings)
        return replace(made, config_dir=str(composed.config_dir or ""))

    allowed = _allowed(facts, lenient, plan_of)
    plan, seen_to_fit = plan_of(allowed[0]), False
    if config.batch.per_device is None:
        plan, seen_to_fit = choose_batch(plan, allowed, means, config.batch.target is not None)
    plan = _explained(plan, usual, chosen, *filter(None, (remark, off)))
    if config.train.resume is not None:
        plan = continued(plan, in_sweep=launcher is not None)
    if means.in_pool:  # its turn comes when others have ended
        plan = at_rest(plan)
    return weighed(plan, trace) if refuse and not seen_to_fit else plan


def switched_off_tracker(composed: Composed) -> str:
    """The warning that the environment has switched W&B off; empty if `tracker.mode` is set."""
    if composed.config.tracker.option != "wandb" or "tracker.mode" in composed.set_paths:
        return ""
    for name, values in SWITCHED_OFF.items():
        if (value := os.environ.get(name, "")).lower() in values:
            return f"tracker=none, as {name}={value} asks for; tracker.mode=offline overrides it"
    return ""


def _target(config: Config, launcher: "Launcher | None") -> tuple[Device, str, int]:
    if launcher is not None:
        return launcher.target(config)
    return *choose_device(config.hardware.option), machines_at_hand()


def _with_enough(device: Device, reason: str, needed: int) -> tuple[Device, str]:
    """A declared GPU as often as it is needed: its number is unknown, and the plan is of one."""
    if device.present or device.kind != "cuda" or needed <= device.count:
        return device, reason
    return replace(device, count=needed), f"{needed} of them taken for granted; {reason}"


def _explained(
    plan: Plan, usual: dict[str, Decision], chosen: Sequence[Decision], *remarks: str
) -> Plan:
    """The plan with decisions of its recipe, what fine-tuning usually takes, and warnings."""
    about_device, *others = plan.decisions
    decisions = tuple(
        replace(each, reason=f"{usual.pop(each.key).reason}; {each.reason}")
        if each.key in usual
        else each
        for each in (about_device, *chosen, *others)
    )
    warnings = (*plan.warnings, *remarks)
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
    """Budget of a single run here; externally started processes each plan, and must agree."""
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


def probe_aloud(plan: Plan, in_pool: bool = False) -> bool | None:
    """Try a plan out on this machine, and say so; in a pool, if its devices are free."""
    from eke.launch.local import probe_in_pool
    from eke.launch.processes.running_run import probe  # a plan starts nothing

    size = plan.batch.per_device
    stop_tracing()
    print_once(f"  probing batch.per_device={size}: two steps, to see whether they fit into memory")
    found = probe_in_pool(plan) if in_pool else probe(plan)
    if found.fits is None:
        print_once(f"  the probe says nothing: {found.reason}")
    else:
        result = "fits" if found.fits else f"does not fit: {found.reason}"
        print_once(f"  batch.per_device={size} {result}")
    return found.fits


def plan_text(
    plan: Plan, *, as_json_text: bool = False, why: bool = False, trace: bool = False
) -> str:
    """All there is to say of a plan that is not to be run; arguments as of `workflows.main`."""
    found = traced_forecast(plan) if trace else known_forecast(plan)
    time = forecast_time(plan)
    advice = composed_advice(plan, trace) if why else []
    if as_json_text:
        content = plan_to_plain(plan) | {"memory": as_json(found)} | time_as_json(time)
        if why:
            content["memory"]["advice"] = [" ".join(each.overrides) for each in advice]
        return json.dumps(content, indent=2)
    parts = [render_plan(plan), render_forecast(plan, found), render_time(time, plan.device.kind)]
    if why:
        parts.append(render_advice(found, advice))
    return "\n\n".join(parts)


def composed_advice(plan: Plan, trace: bool = False) -> list[Advice]:
    """Advice whose overrides compose with the given ones."""
    found = [each for each in advise(plan) if composes(plan.overrides, each.overrides)]
    if not trace:
        return found
    seen = [
        replace(each, forecast=traced_forecast(each.plan)) if is_open(each.forecast) else each
        for each in found
    ]
    kept = (each for each in seen if each.forecast.verdict in ROOM)
    return sorted(kept, key=lambda advice: advice.rank)


def open_forecasts(
    plans: Mapping[Key, Plan], progress: Callable[[int, int], None]
) -> dict[Key, Forecast]:
    """Traced forecasts of the plans whose fit formulas cannot decide."""
    unsure = {key: plan for key, plan in plans.items() if is_open(known_forecast(plan))}
    if not unsure:
        return {}
    found = traced_forecasts(list(unsure.values()), progress, processes=usable_cores())
    return dict(zip(unsure, found, strict=True))


def composes(typed: Sequence[str], more: Sequence[str]) -> bool:
    """Whether overrides can replace, or follow, the given ones."""
    keys = {text.partition("=")[0] for text in more}
    kept = [text for text in typed if text.lstrip("+").partition("=")[0] not in keys]
    with suppress(ConfigError):
        compose([*kept, *more])
        return True
    return False


def refuse_why_of_many(arguments: Arguments, why: bool) -> None:
    """Raise ConfigError if `--why`, which is about one plan, is given for several."""
    if why and (arguments.multirun or ALL_DEVICES in arguments.overrides):
        many = "-m" if arguments.multirun else ALL_DEVICES
        text = f"explains one configuration on one device, and {many} names several"
        raise ConfigError(Problem("--why", "", text, Fix(remark="--why with one of them")))


def compare_on_all_devices(
    arguments: Arguments, *, as_json_text: bool = False, trace: bool = False
) -> str:
    """One line for each device of the table."""
    typed = [text for text in arguments.overrides if text != ALL_DEVICES]
    if arguments.multirun:
        why = "compares devices for one configuration, and -m has many"
        raise ConfigError(Problem("hardware", "all", why, Fix("hardware=h100")))
    if "plan_only=true" not in typed:
        why = "compares the known devices, which is planning, and nothing can run on all of them"
        fix = Fix("plan_only=true", remark="or hardware=auto")
        raise ConfigError(Problem("hardware", "all", why, fix))
    composed = compose(typed, arguments.config_dir)
    plans: dict[str, Plan] = {}
    refused: list[OnDevice] = []
    for option, device in DEVICES.items():
        config = replace(composed.config, hardware=replace(composed.config.hardware, option=option))
        one = replace(composed, config=config, choices=composed.choices | {"hardware": option})
        try:
            target = device, f"declared by hardware={option}", 1
            plans[option] = plan_for(one, planning=True, target=target)
        except ConfigError as error:
            refused.append(OnDevice(option, device.memory_bytes, reason=error.short()))
    if not plans:
        raise ConfigError(Problem("hardware", "all", refused[0].reason))
    times = {option: forecast_time(plan) for option, plan in plans.items()}
    line = PlanningLine()
    forecasts = {option: known_forecast(plan) for option, plan in plans.items()}
    progress = line.counter("traced the memory of", "plan")
    forecasts |= open_forecasts(plans, progress) if trace else {}
    line.close()
    planned = [
        OnDevice(
            option, plans[option].device.memory_bytes, found, largest_batch(plans[option], found),
            speed=speed_cell(times[option]), speed_runs=num_runs(times[option]),
            per_device=plans[option].batch.per_device,
        )
        for option, found in forecasts.items()
    ]  # fmt: skip
    rows = sorted([*planned, *refused], key=lambda row: row.memory_bytes or 0)
    if as_json_text:
        content = [
            {
                "hardware": row.option, "memory_bytes": row.memory_bytes,
                "memory": as_json(row.forecast) if row.forecast else None,
                **(time_as_json(times[row.option]) if row.option in times else {}),
                "largest_micro_batch": row.batch, "per_device": row.per_device or None,
                "refused": row.reason,
            }
            for row in rows
        ]  # fmt: skip
        return json.dumps(content, indent=2)
    config = composed.config
    count = config.distributed.num_processes
    table = render_devices(rows, config.batch.per_device, samples_to_keep(config), count)
    return "\n".join([table, *table_notes(times.values())])
