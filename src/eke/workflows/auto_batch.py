"""Choice of the micro-batch, adaptive recipes and fine-tuning defaults."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import format_bytes
from eke.config.compose import Composed, compose_with, is_set, user_set_keys
from eke.config.compose.catalogue import make_catalogue
from eke.config.schema import DEFAULT_PER_DEVICE, Config, Mix, Rows
from eke.estimate.memory import (
    BatchChoice,
    BatchSearch,
    Forecast,
    Method,
    Probe,
    Verdict,
    note_choice,
    reserve_of,
    room_for_a_batch,
)
from eke.hardware import Device, bfloat16_units, usable_cores
from eke.models.checkpoints.architecture import router_loss
from eke.plan.fine_tuning_defaults import LR, SAMPLES, SET_BY, fine_tuning_defaults
from eke.plan.planner import (
    Decision,
    Plan,
    RecipeDecision,
    ShownDecision,
    make_plan,
    replan,
    with_batch,
)
from eke.plan.planner.samples import plan_batch, possible_batches, samples_to_keep
from eke.rules import BY_SIZE, RuleInputs, check
from eke.tuning.check_memory_fit import reject_probed_oom
from eke.tuning.recipes import RECIPES, ChoiceContext, RecipeResolver


@dataclass(frozen=True)
class BatchSearchBudget:
    """Budget for the choice."""

    trace: bool = False
    """True if to spend seconds on traces if formulas cannot decide."""
    probe: Probe | None = None
    """Function that runs two steps of a plan."""
    not_probed: str = "planning only"
    """Reason for no probe."""
    in_pool: bool = False
    """True if other runs of a sweep may use the device, or a CPU's memory, at the same time."""
    keep: bool = False
    """True if the run starts, so that later commands reuse its choice."""


@dataclass(frozen=True)
class ValidCandidate:
    """A configuration that no rule rejects."""

    config: Config
    warnings: tuple[str, ...]


def valid_candidates(facts: RuleInputs, lenient: bool) -> list[ValidCandidate]:
    """Return the configuration, or with batch=auto each micro-batch, that no rule rejects.

    `lenient` skips rules about memory, for the forecast. Raises ConfigError with all broken rules.
    """
    refused, found = _apply_rules(facts, lenient)
    is_fixed = facts.config.batch.per_device is not None
    # With batch=auto, a rule about `batch` concerns the target, or the smallest micro-batch.
    if refused and (is_fixed or any(each.key.startswith("batch.") for each in refused)):
        raise ConfigError(refused)
    if is_fixed:
        return [found]
    configs = possible_batches(facts.config)
    tried = [_apply_rules(replace(facts, config=each), lenient) for each in configs]
    allowed = [each for refused, each in tried if not refused]
    if not allowed:
        raise ConfigError(min((refused for refused, _ in tried), key=len))
    return allowed


def _apply_rules(facts: RuleInputs, lenient: bool) -> tuple[list[Problem], ValidCandidate]:
    refused, warned = check(facts)
    if lenient:
        refused = [problem for problem in refused if problem.id not in BY_SIZE]
    warnings = tuple(f"{p.key} = {p.value}: {p.why} ({p.fix})" for p in warned)
    return refused, ValidCandidate(facts.config, warnings)


def with_all_memory_free(plan: Plan) -> Plan:
    """Return the plan with all of a CPU's memory free."""
    return replace(plan, device=replace(plan.device, available_bytes=None))


def memory_asked_for(plan: Plan) -> int | None:
    """Return the bytes for tensors in the requested host memory on a cluster, None if not set."""
    device, memory = plan.device, plan.config.resources.memory or ""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", memory.upper())  # invalid values are reported later
    if found is None or device.kind != "cpu" or device.memory_bytes is not None:
        return None
    per_node = int(found[1]) * 1024 ** (" KMGT".index(found[2] or "M"))  # sbatch: megabytes
    return room_for_a_batch(replace(plan, device=replace(device, memory_bytes=per_node)))


def choose_batch(
    plan: Plan, allowed: Sequence[ValidCandidate], means: BatchSearchBudget, target_given: bool
) -> tuple[Plan, bool]:
    """Return the plan with the largest micro-batch that fits, and whether a probe has fit."""
    launcher, share = plan.config.launcher, 1
    if means.in_pool:  # number of runs that use the device, or a CPU's memory, at the same time
        at_once = launcher.cpu_slots // plan.batch.world_size
        share = max(1, at_once) if plan.device.kind == "cpu" else launcher.runs_per_device
    if share > 1:
        means = replace(means, probe=None, not_probed="runs of this sweep share its device")
    capacity = room_for_a_batch(plan, share)
    if capacity is None:
        capacity = memory_asked_for(plan)
    if capacity is None:
        why = f"requires the memory of {plan.device.name}, which is unknown"
        fix = Fix("batch=fixed", f"batch.per_device={DEFAULT_PER_DEVICE}")
        if plan.device.kind == "cpu":
            fix = Fix("resources.memory=64G", remark=f"or {fix}")
        raise ConfigError(Problem("batch", "auto", why, fix, "unknown_device"))
    plans = [replan(plan, each.config) for each in allowed]
    whole = room_for_a_batch(with_all_memory_free(plan), share)
    search = BatchSearch(plans, capacity, means.trace, means.probe, whole)
    chosen = search.run()
    taken = allowed[chosen.number]
    reasons = _reasons(search, chosen, means)
    if not target_given:
        why = "samples per step of batch=fixed"
        reasons.insert(0, ShownDecision("batch.target", str(samples_to_keep(plan.config)), why))
    cut = with_batch(plan, taken.config, reasons, taken.warnings)
    if search.known.has_failed(plans[chosen.number]):
        reject_probed_oom(cut, search.forecast(chosen.number))
    if chosen.fits and means.keep:
        note_choice(search.key, cut.batch.samples_per_step, cut.batch.per_device)
    return cut, chosen.how == "probed"


def _reasons(search: BatchSearch, chosen: BatchChoice, means: BatchSearchBudget) -> list[Decision]:
    plan, found = search.plans[chosen.number], search.forecast(chosen.number)
    has_larger = chosen.fits and chosen.number + 1 < len(search.plans)
    target, capacity = samples_to_keep(plan.config), search.capacity
    kept, reserve = f"with batch.target={target} kept", reserve_of(plan)
    if not chosen.fits:
        enough = found.peak.high <= capacity + reserve
        left = f"fits, but leaves less than {format_bytes(reserve)} to others"
        tight = "does not" if found.verdict is Verdict.does_not_fit else "may not"
        what = f"smallest {kept}, and {left if enough else f'{tight} fit'}"
    elif router_loss(plan.config) is not None:
        what = "kept, as task.router_loss is a mean over each micro-batch"
    elif has_larger:
        what = f"largest that fits {kept}"
    else:
        what = f"all of batch.target={target} at once fits"
    how = " by formulas" if found.method is Method.closed_form else ""
    expected = f"{format_bytes(found.peak.expected)} expected{how}"
    expected += f"{_why_not_traced(found)} of {format_bytes(capacity + reserve)}"
    expected += f" for tensors, {format_bytes(reserve)} of it for others" if reserve else ""
    words = [f"auto: {what}: {expected}"]
    if chosen.how != "predicted":
        words.append("probed" if chosen.how == "probed" else "same choice as before")
    if has_larger:
        words.append(_why_not_larger(search, chosen, means))
    return [ShownDecision("batch.per_device", str(plan.batch.per_device), "; ".join(words))]


def _why_not_larger(search: BatchSearch, chosen: BatchChoice, means: BatchSearchBudget) -> str:
    number = chosen.number + 1
    size, found = search.plans[number].batch.per_device, search.forecast(number)
    peak = found.peak
    if search.known.has_failed(search.plans[number]):
        return f"{size} ran out of memory in a probe"
    if search.fits(number) is False or chosen.how == "as before":
        return f"{size} would need {format_bytes(peak.expected)}"
    between = f"{format_bytes(peak.low)} to {format_bytes(peak.high)}"
    between += _why_not_traced(found)
    why = "" if means.probe is not None else f": {means.not_probed}"
    return f"{size} would need {between}, not probed{why}"


def _why_not_traced(found: Forecast) -> str:
    return f" (not traced: {found.not_traced})" if found.not_traced else ""


def chosen_overrides(plan: Plan, own: Path | None = None) -> list[str]:
    """Return overrides equivalent to the decisions of a plan's recipe. `own`: the user's folder."""
    catalogue = make_catalogue(own)
    typed = {*catalogue.options, *catalogue.keys}  # other decisions follow from these keys
    return [
        f"{decision.key}={decision.value}"
        for decision in plan.decisions
        if isinstance(decision, RecipeDecision) and decision.key in typed
    ]


def apply_recipe(
    composed: Composed, config: Config, device: Device, num_nodes: int
) -> tuple[Config, Mapping[str, str], Sequence[Decision]]:
    """Return the configuration with its recipe's choices, all choices, and the recipe's decisions.

    A recipe keeps keys set by overrides, a sweep or the experiment, and keys whose change a rule
    rejects.
    """
    recipe = RECIPES.get(composed.choices.get("recipe", "none"))
    if recipe is None:
        return config, composed.choices, ()
    # An option's accumulation would change the samples per step with the micro-batch: fix them.
    by_option = config.batch.accumulation is not None
    by_option &= not is_set(composed, "batch.accumulation")
    kept = (f"batch.target={plan_batch(config, []).samples_per_step}",) if by_option else ()
    resolver = RecipeResolver(
        recipe, user_set_keys(composed), lambda more: compose_with(composed, (*kept, *more)).config
    )
    cores = usable_cores() // max(1, config.distributed.num_processes)
    units = bfloat16_units() if device.kind == "cpu" else ()
    start = ChoiceContext(config, device, num_nodes=num_nodes, cores=cores, bfloat16_units=units)

    def plan(config: Config) -> Plan:
        return make_plan(config, composed.choices, composed.overrides, device, "")

    chosen = resolver.choose_all(start, plan).config
    decided = resolver.decisions
    options = {each.key: each.value for each in decided if each.key in composed.choices}
    return chosen, {**composed.choices, **options}, decided


def apply_fine_tuning_defaults(
    config: Config, composed: Composed, count: Callable[[Config], int]
) -> tuple[Config, tuple[Decision, ...], str]:
    """Apply defaults of fine-tuning. Return reasons and a warning. `count`: samples of an epoch."""
    # Rates, decay and clipping of options are for random weights.
    usual = fine_tuning_defaults(config)
    if not usual:
        return config, (), ""
    decisions, warning = [], ""
    # A DeepSpeed file may have the same keys, whose values must agree.
    own = getattr(config.distributed, "deepspeed_config", None) is not None
    for quantity, each in usual.items():
        if any(is_set(composed, key) for key in SET_BY[quantity]) or (own and quantity != LR):
            continue
        (group, _, name), words = quantity.partition("."), "usual"
        changes: Mapping[str, float | None] | None = {name: each.value}
        if quantity == SAMPLES:
            group, words = "batch", f"at least {each.value:g} are usual"
            changes = _accumulated(config, int(each.value), count)
        if changes is None:
            continue
        config = replace(config, **{group: replace(getattr(config, group), **changes)})
        reason = f"{words} for {each.source}; no {SET_BY[quantity][0]} was set"
        row = "learning rate" if quantity == LR else quantity
        decisions.append(ShownDecision(row, f"{each.value:g}", reason))
    if LR not in usual and not is_set(composed, LR):
        warning = f"optimizer.lr = {config.optimizer.lr:g} is {config.optimizer.option}'s for "
        warning += "random weights; fine-tuning usually takes less (optimizer.lr=...)"
    open_end = config.train.epochs is None and config.train.steps is None
    if open_end and isinstance(config.data, Rows | Mix):
        epochs = 3.0  # transformers' TrainingArguments.num_train_epochs
        config = replace(config, train=replace(config.train, epochs=epochs))
        reason = "usual for fine-tuning; neither train.steps nor train.epochs was set"
        decisions.append(ShownDecision("train.epochs", f"{epochs:g}", reason))
    return config, tuple(decisions), warning


def _accumulated(
    config: Config, wanted: int, count: Callable[[Config], int]
) -> dict[str, int | None] | None:
    """Return keys for this number of samples per step, None if it is set or the data has fewer."""
    batch, unit = config.batch, DEFAULT_PER_DEVICE * config.distributed.num_processes
    if batch.per_device not in (None, DEFAULT_PER_DEVICE) or batch.accumulation or batch.target:
        return None
    if (times := -(-wanted // unit)) == 1:
        return {}
    target, more = (times * unit, None) if batch.per_device is None else (None, times)
    batch = replace(batch, target=target, accumulation=more)
    enough = count(replace(config, batch=batch)) >= times * unit
    return {"target": target, "accumulation": more} if enough else None
