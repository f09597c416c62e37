"""Plan one configuration for a device, and show its forecast, advice or all devices."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.process_env import is_first, num_allocated_nodes, ranks_are_started
from eke.common.screen import fields, is_quiet, is_verbose, paint, width, wrap
from eke.common.text import format_bytes
from eke.config.compose import Arguments, Composed, compose, is_set
from eke.config.schema import Config, CustomData, CustomTask, Tracker, resolve_attention
from eke.estimate.memory import (
    DeviceForecast,
    Forecast,
    Verdict,
    as_json,
    forecast_details,
    forecast_lines,
    known_forecast,
    largest_batch,
    memory_table,
    needs_trace,
    render_devices,
    stop_tracing,
    traced_forecast,
    traced_forecasts,
)
from eke.estimate.memory.render_memory import host_budget
from eke.estimate.time import (
    StepTime,
    Unknown,
    forecast_time,
    num_runs,
    speed_cell,
    table_notes,
    time_rows,
)
from eke.estimate.time import step_time_json as time_as_json
from eke.hardware import DEVICES, Device, choose_device, usable_cores
from eke.models.checkpoints import follow_head, resolve_model, resolve_tokenizer
from eke.plan.own_code import Code
from eke.plan.planner import (
    Decision,
    Plan,
    ShownDecision,
    make_plan,
    plan_to_plain,
    render_plan,
    samples_to_keep,
)
from eke.plan.planner.samples import plan_data
from eke.results.report.summary import PlanningLine
from eke.rules import BY_SIZE, NOT_BY_SIZE, RuleInputs, check
from eke.tuning.check_memory_fit import first_memory_advice, reject_unfit_plan
from eke.tuning.memory_advice import Advice, advise, render_advice
from eke.tuning.recipe_search import ROOM
from eke.workflows import ALL_DEVICES, print_once
from eke.workflows.auto_batch import (
    BatchSearchBudget,
    ValidCandidate,
    apply_fine_tuning_defaults,
    apply_recipe,
    choose_batch,
    valid_candidates,
    with_all_memory_free,
)
from eke.workflows.own_code import resolve_own_code
from eke.workflows.resume import continued

if TYPE_CHECKING:
    from eke.launch.interface import Launcher

_Key = TypeVar("_Key", int, str)
SIZE = "batch.per_device"


def plan_for(composed: Composed, planning: bool, **how: Any) -> Plan:
    """Plan as `_plan_for`. An unset batch.per_device is reduced if there are fewer samples."""
    try:
        return _plan_for(composed, planning, **how)
    except ConfigError as error:
        # The error about the data proposes a smaller value.
        words = [p.fix.words for p in error.problems if (p.key, p.id) == (SIZE, "too_few_samples")]
        key, _, size = words[0][0].partition("=") if list(map(len, words)) == [1] else ("", "", "")
        is_unset = composed.choices["batch"] == "fixed" and not is_set(composed, SIZE)
        if key != SIZE or not is_unset:
            raise
    batch = replace(composed.config.batch, per_device=int(size))
    fewer = replace(composed, config=replace(composed.config, batch=batch))
    plan = _plan_for(fewer, planning, **how)
    few = f"{SIZE}={size}: only {plan.steps.num_train_samples} samples to train on"
    return replace(plan, warnings=(*plan.warnings, few))


def _plan_for(
    composed: Composed,
    planning: bool,
    launcher: "Launcher | None" = None,
    reject: bool | None = None,
    trace: bool = True,
    means: BatchSearchBudget | None = None,
    target: tuple[Device, str, int] | None = None,
    frozen: tuple[Code, Path] | None = None,
) -> Plan:
    """Check and plan one configuration. Raise ConfigError with all broken rules.

    With `planning` no run starts. Without `launcher` it is a single run on this machine. `reject`
    rejects a run that cannot fit into memory, by default if it starts. `trace` permits seconds for
    a trace if formulas cannot decide that. `means` is the budget of batch=auto. `target` has the
    device, the reason for it and the number of nodes, by default the launcher's. `frozen` is as in
    `resolve_own_code`.
    """
    means = means or BatchSearchBudget()
    if target is None and launcher is not None:
        target = launcher.target(composed.config)
    elif target is None:
        target = *choose_device(composed.config.hardware.option), num_allocated_nodes()
    device, reason, num_nodes = _with_enough_devices(*target, composed.config)
    composed, own_task = with_own_task(composed)
    config = resolve_attention(resolve_model(composed.config, composed.overrides, planning))
    config, code = resolve_own_code(config, composed.config_dir, frozen)
    attention = {"attention": config.attention.option}
    composed = replace(composed, choices={**composed.choices, **attention})
    config = config if is_set(composed, "task.num_labels") else follow_head(config)

    def count(config: Config) -> int:
        refused, _ = check(RuleInputs(config, device, planning, num_nodes), NOT_BY_SIZE)
        return 0 if refused else plan_data(config, []).train  # rejections are reported later

    config, first, _ = apply_fine_tuning_defaults(resolve_tokenizer(config), composed, count)
    config, choices, chosen = apply_recipe(composed, config, device, num_nodes)
    config, again, remark = apply_fine_tuning_defaults(config, composed, count)  # for the recipe
    if off := switched_off_tracker(composed):
        config, choices = replace(config, tracker=Tracker("none")), {**choices, "tracker": "none"}
    reject = not planning if reject is None else reject
    lenient = not reject or config.ignore_forecast  # the forecast shows more details
    facts = RuleInputs(config, device, planning, num_nodes, partial(is_set, composed))

    def plan_of(each: ValidCandidate) -> Plan:
        rest = choices, composed.overrides, device, reason, each.warnings, code
        made = make_plan(each.config, *rest)
        return replace(made, config_dir=str(composed.config_dir or ""))

    allowed = _allowed_candidates(facts, lenient, plan_of)
    plan, has_fit = plan_of(allowed[0]), False
    if config.batch.per_device is None:
        plan, has_fit = choose_batch(plan, allowed, means, config.batch.target is not None)
    usual = {decision.key: decision for decision in (*own_task, *first, *again)}
    plan = _explained(plan, usual, chosen, *filter(None, (remark, off)))
    if config.train.resume is not None:
        plan = continued(plan, in_sweep=launcher is not None)
    if means.in_pool:  # it starts after others have ended
        plan = with_all_memory_free(plan)
    return check_memory_fit(plan, trace) if reject and not has_fit else plan


def with_own_task(composed: Composed) -> tuple[Composed, tuple[Decision, ...]]:
    """Return the run with task=custom if its data is custom and no task is set, with the reason."""
    if not isinstance(composed.config.data, CustomData) or is_set(composed, "task"):
        return composed, ()
    task = CustomTask()
    config, choices = replace(composed.config, task=task), {**composed.choices, "task": task.option}
    reason = "data=custom has samples of your own code; no task was set"
    decision = ShownDecision("task", task.option, reason)
    return replace(composed, config=config, choices=choices), (decision,)


def _with_enough_devices(
    device: Device, reason: str, num_nodes: int, config: Config
) -> tuple[Device, str, int]:
    """Return a declared GPU, whose number is unknown, as often as the run needs it."""
    needed = config.distributed.processes_per_node
    if not device.present and device.kind == "cuda" and needed > device.count:
        device, reason = replace(device, count=needed), f"{needed} of them assumed; {reason}"
    return device, reason, num_nodes


def switched_off_tracker(composed: Composed) -> str:
    """Return the warning that the environment disables W&B, "" if `tracker.mode` is set."""
    if composed.config.tracker.option != "wandb" or "tracker.mode" in composed.set_paths:
        return ""
    # transformers also reads the older variable.
    disabling = {"WANDB_MODE": ("disabled",), "WANDB_DISABLED": ("1", "true", "yes", "on")}
    for name, values in disabling.items():
        if (value := os.environ.get(name, "")).lower() in values:
            return f"tracker=none, due to {name}={value}. tracker.mode=offline overrides it"
    return ""


def _explained(
    plan: Plan, usual: dict[str, Decision], chosen: Sequence[Decision], *remarks: str
) -> Plan:
    """Return the plan with decisions of its recipe, defaults of fine-tuning, and warnings."""
    about_device, *others = plan.decisions
    decisions = tuple(
        replace(each, reason=f"{usual.pop(each.key).reason}; {each.reason}")
        if each.key in usual
        else each
        for each in (about_device, *chosen, *others)
    )
    warnings = (*plan.warnings, *remarks)
    return replace(plan, decisions=(*decisions, *usual.values()), warnings=warnings)


def _allowed_candidates(
    facts: RuleInputs, lenient: bool, plan_of: Callable[[ValidCandidate], Plan]
) -> list[ValidCandidate]:
    """Return `valid_candidates`. If only the size is rejected, propose a sufficient fix."""
    try:
        return valid_candidates(facts, lenient)
    except ConfigError as error:
        if any(problem.id not in BY_SIZE for problem in error.problems):
            raise
        try:
            smallest = plan_of(valid_candidates(facts, lenient=True)[0])
        except ConfigError:  # there is another problem: report the rule's first
            raise error from None
        raise ConfigError([_with_fix(each, smallest) for each in error.problems]) from None


def _with_fix(problem: Problem, plan: Plan) -> Problem:
    """Return a rule's problem about a lower bound with an override that suffices for the run."""
    advice = first_memory_advice(plan, known_forecast(plan))
    if advice is None or check(RuleInputs(advice.plan.config, plan.device, planning=True))[0]:
        return problem
    remark = f"{format_bytes(advice.forecast.peak.expected)} expected"
    if not advice.keeps:
        remark += ", another training"
    return replace(problem, fix=Fix(*advice.overrides, remark=remark))


def check_memory_fit(plan: Plan, trace: bool = True, found: Forecast | None = None) -> Plan:
    """Return the plan, with a warning if memory is tight. Raise ConfigError if it cannot fit."""
    found = found or known_forecast(plan)
    if trace and needs_trace(found):
        found = traced_forecast(plan)
    warning = reject_unfit_plan(plan, found)
    return replace(plan, warnings=(*plan.warnings, warning)) if warning else plan


def single_run_budget(config: Config) -> BatchSearchBudget:
    """Return the budget of a single run on this machine."""
    if ranks_are_started():  # each process plans, and all plans must be equal
        why = "processes of another launcher are not probed"
        return BatchSearchBudget(not_probed=why, keep=is_first())
    if config.distributed.num_nodes > 1:
        return BatchSearchBudget(trace=True, not_probed="it has several nodes", keep=True)
    return BatchSearchBudget(trace=True, probe=_probe_and_report, keep=True)


def means_of_a_cell(config: Config, launcher: "Launcher") -> BatchSearchBudget:
    """Return the budget of a sweep's run, before the first run starts."""
    if config.plan_only:
        return BatchSearchBudget(in_pool=not launcher.not_probed)
    if launcher.not_probed:
        return BatchSearchBudget(trace=True, not_probed=launcher.not_probed, keep=True)
    return BatchSearchBudget(
        trace=True, probe=partial(_probe_and_report, in_pool=True), in_pool=True, keep=True
    )


def _probe_and_report(plan: Plan, in_pool: bool = False) -> bool | None:
    """Probe a plan on this machine and print the result. In a pool, its devices must be free."""
    from eke.launch.local import probe_in_pool
    from eke.launch.processes.run_attempt import probe  # a plan starts nothing

    size = plan.batch.per_device
    stop_tracing()
    show = partial(print_once, to=sys.stderr)
    show(f"probing batch.per_device={size}: two steps, to test whether they fit into memory")
    found = probe_in_pool(plan) if in_pool else probe(plan)
    if found.fits is None:
        show(f"the probe has no result: {found.reason}")
    else:
        result = "fits" if found.fits else f"does not fit: {found.reason}"
        show(f"batch.per_device={size} {result}")
    return found.fits


def plan_text(
    plan: Plan, *, as_json_text: bool = False, why: bool = False, trace: bool = False
) -> str:
    """Return a plan with its forecasts as text or JSON. Arguments as in `workflows.main`."""
    time, advice = forecast_time(plan), None
    with closing(PlanningLine()) as line:
        if trace:
            line.begin("tracing two training steps, to forecast their memory")
        found = traced_forecast(plan) if trace else known_forecast(plan)
        shows_advice = is_verbose() or found.verdict is Verdict.does_not_fit
        if why or (shows_advice and not is_quiet() and not as_json_text):
            advice = _composed_advice(plan, found, trace)
    if as_json_text:
        content = plan_to_plain(plan) | {"memory": as_json(found)} | time_as_json(time)
        if why:
            content["memory"]["advice"] = [" ".join(each.overrides) for each in advice or ()]
        return json.dumps(content, indent=2)
    return "\n".join(_plan_lines(plan, found, time, advice, why))


def _plan_lines(
    plan: Plan, found: Forecast, time: StepTime | Unknown, advice: list[Advice] | None, why: bool
) -> list[str]:
    """Return verdict, cost, advice and remarks. With `-v`, also every derived setting."""
    details = is_verbose()
    lines = forecast_lines(plan, found)
    if is_quiet():
        return lines
    rows = time_rows(time, plan.steps.total, plan.device.kind, details)
    if plan.device.kind != "cpu" and plan.ranks.num_processes > 1:
        rows.append(("host", f"{host_budget(plan, found)} memory of a node"))
    lines += ["", *memory_table(found, details), "", *fields(rows, width())]
    if advice is not None:
        lines += ["", *render_advice(found, advice, why or details)]
    lines += ["", *fields(remarks, width())] if (remarks := remark_rows(plan)) else []
    if details:
        return [*lines, "", render_plan(plan), "", *forecast_details(plan, found)]
    more = "" if advice is not None else "--why: changes that need less memory   "
    more = f"-v: every derived setting with its reason   {more}--json"
    return [*lines, "", *(paint(line, "dim") for line in wrap(more, width()))]


def remark_rows(plan: Plan, to: TextIO | None = None) -> list[tuple[str, str]]:
    """Return warnings, and what is ignored or chosen in place of the user."""
    chosen = [each for each in plan.decisions if isinstance(each, ShownDecision)]
    rows = [("chosen", f"{each.key}={each.value}: {each.reason}") for each in chosen]
    return rows + [(paint("warning", "yellow", to), warning) for warning in plan.warnings]


def _composed_advice(plan: Plan, now: Forecast, trace: bool = False) -> list[Advice]:
    """Return the advice that needs less memory and composes with the plan's own overrides."""
    found = [each for each in advise(plan) if _composes(plan.overrides, each.overrides)]
    seen = [
        replace(each, forecast=traced_forecast(each.plan))
        if trace and needs_trace(each.forecast) else each
        for each in found
    ]  # fmt: skip
    least = (each for each in seen if each.forecast.peak.expected < now.peak.expected)
    return sorted((a for a in least if a.forecast.verdict in ROOM), key=lambda a: a.rank)


def open_forecasts(
    plans: Mapping[_Key, Plan], progress: Callable[[int, int], None]
) -> dict[_Key, Forecast]:
    """Return traced forecasts of the plans whose fit is unknown by formulas."""
    unsure = {key: plan for key, plan in plans.items() if needs_trace(known_forecast(plan))}
    if not unsure:
        return {}
    found = traced_forecasts(list(unsure.values()), progress, processes=usable_cores())
    return dict(zip(unsure, found, strict=True))


def _composes(typed: Sequence[str], more: Sequence[str]) -> bool:
    """Return whether overrides can replace, or follow, the typed ones."""
    keys = {text.partition("=")[0] for text in more}
    kept = [text for text in typed if text.lstrip("+").partition("=")[0] not in keys]
    with suppress(ConfigError):
        compose([*kept, *more])
        return True
    return False


def require_single_plan(arguments: Arguments, why: bool) -> None:
    """Raise ConfigError if `--why`, which is about one plan, is given for several."""
    if why and (arguments.multirun or ALL_DEVICES in arguments.overrides):
        many = "-m" if arguments.multirun else ALL_DEVICES
        text = f"explains one configuration on one device, but {many} has several"
        problem = Problem("--why", "", text, Fix(remark="--why with one of them"), "single_only")
        raise ConfigError(problem)


def compare_on_all_devices(
    arguments: Arguments, *, as_json_text: bool = False, trace: bool = False
) -> str:
    """Return one line per known device, or JSON."""
    typed = [text for text in arguments.overrides if text != ALL_DEVICES]
    if arguments.multirun:
        why = "compares devices for one configuration, but -m has several"
        raise ConfigError(Problem("hardware", "all", why, Fix("hardware=h100"), "single_only"))
    if "plan_only=true" not in typed:
        why = "compares the known devices, which requires plan_only=true"
        fix = Fix("plan_only=true", remark="or hardware=auto")
        raise ConfigError(Problem("hardware", "all", why, fix, "needs_plan_only"))
    composed = compose(typed, arguments.config_dir)
    plans: dict[str, Plan] = {}
    refused: list[DeviceForecast] = []
    for option, device in DEVICES.items():
        config = replace(composed.config, hardware=replace(composed.config.hardware, option=option))
        one = replace(composed, config=config, choices=composed.choices | {"hardware": option})
        try:
            target = device, f"declared by hardware={option}", 1
            plans[option] = plan_for(one, planning=True, target=target)
        except ConfigError as error:
            refused.append(DeviceForecast(option, device.memory_bytes, reason=error.short()))
    if not plans:
        raise ConfigError(Problem("hardware", "all", refused[0].reason, id="all_rejected"))
    times = {option: forecast_time(plan) for option, plan in plans.items()}
    line = PlanningLine()
    forecasts = {option: known_forecast(plan) for option, plan in plans.items()}
    progress = line.counter("traced the memory of", "plan")
    forecasts |= open_forecasts(plans, progress) if trace else {}
    line.close()
    planned = [
        DeviceForecast(
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
