"""Candidate configurations: combinations that rules allow and that may fit, without torch."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError
from eke.common.text import format_value
from eke.config.compose import Composed, compose
from eke.config.schema import Config
from eke.config.schema.codec import make_converter
from eke.estimate.memory import Forecast, Verdict, known_forecast
from eke.estimate.time import compile_seconds, steps_to_pay
from eke.hardware import Device
from eke.models.checkpoints.architecture import router_loss
from eke.plan.planner import Plan, possible_batches, replan, with_batch
from eke.rules.techniques import CUDA, QUARTER_BATCH, TECHNIQUES, Numerics, group_of
from eke.tuning.recipe_search import RuleFindings, combine, findings
from eke.tuning.search.search import drop_overrides
from eke.tuning.search.search_space import Point


@dataclass(frozen=True)
class _Value:
    """One value of an axis."""

    name: str
    overrides: tuple[str, ...]
    """Empty for the baseline."""
    usual: float = 1.0
    """Published step time relative to the baseline, a first guess."""
    needless_beside: tuple[str, ...] = ()
    """Values of the axis that compute the same with fewer operations and more memory."""


_SearchAxis = tuple[_Value, ...]
"""Techniques of a group that exclude each other. The baseline is first."""

_PER_DOUBLING = 1 / math.sqrt(QUARTER_BATCH.slowdown)
"""Step time relative to half the micro-batch, from the guides' V100 with 4 samples and 1."""


def axes_for(
    choices: Mapping[str, str], typed: Sequence[str], device: Device, numerics: Numerics
) -> list[_SearchAxis]:
    """Return the axes for a device: every group without an override."""
    kept = set(map(group_of, typed))
    names = dict.fromkeys(each.group for each in TECHNIQUES.values() if each.searched)
    axes = [_make_axis(name, choices, device, numerics, kept) for name in names if name not in kept]
    axes += [] if "distributed" in kept else [_sharing(device)]
    return [axis for axis in axes if len(axis) > 1]


def _make_axis(
    name: str, choices: Mapping[str, str], device: Device, numerics: Numerics, kept: set[str]
) -> _SearchAxis:
    mine = [each for each in TECHNIQUES.values() if each.searched and each.group == name]
    typed = f"{name}={choices[name]}"
    known = next((each for each in mine if each.name == typed), None)
    before = known.slowdown_on(device.kind) if known else 1.0
    others = [
        _Value(each.name, each.overrides, each.slowdown_on(device.kind) / before, each.more_memory)
        for each in mine
        if device.kind in each.devices
        and each.numerics in numerics.includes
        and each.name != typed
        and not kept.intersection(map(group_of, each.overrides))
    ]
    first = _Value(typed, (), needless_beside=known.more_memory if known else ())
    return (first, *others)


def _sharing(device: Device) -> _SearchAxis:
    """Return numbers of GPUs of this machine, in powers of two."""
    if device.kind != CUDA:
        return ()
    values = [_Value("distributed=none", ())]
    for count in (2**n for n in range(1, device.count.bit_length())):
        overrides = ("distributed=ddp", f"distributed.num_processes={count}")
        values.append(_Value(" ".join(overrides), overrides, 1 / count))
    return tuple(values)


MAX_SIZES = 6
"""Largest micro-batches tried per set of techniques: smaller ones may save memory or fit caches."""


def search_verdict(forecast: Forecast) -> Verdict:
    """Return a forecast's verdict for a search, which counts unknown memory as fitting."""
    return Verdict.fits if forecast.verdict is Verdict.unknown else forecast.verdict


@dataclass(frozen=True)
class Candidate:
    """One configuration that rules allow."""

    point: Point
    values: tuple[_Value, ...]
    plan: Plan
    """Plan for forecasts. The run itself is planned again from its overrides."""
    forecast: Forecast

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides that turn the baseline into the candidate, with its micro-batch."""
        own = (text for value in self.values for text in value.overrides)
        return (*own, *cut_overrides(self.plan))


def cut_overrides(plan: Plan) -> tuple[str, ...]:
    """Return a plan's micro-batch settings as overrides."""
    return (
        f"batch.per_device={plan.batch.per_device}",
        f"batch.target={plan.batch.samples_per_step}",
        "batch.accumulation=null",
    )


@dataclass(frozen=True)
class Candidates:
    """All candidates, and the number of excluded configurations."""

    found: list[Candidate]
    first: int | None
    """Index of the baseline. None if it cannot run."""
    num_sets: int
    refused: dict[str, int]
    """Number of rejected sets of techniques by rule."""
    too_large: int
    """Configurations that rules allow but that cannot fit."""


def enumerate_candidates(
    baseline: Plan,
    composed: Composed,
    axes: Sequence[_SearchAxis],
    config_dir: Path | None,
    expected_s: Callable[[Plan], float | None],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Candidates:
    """Return all combinations of the axes' values, each with its micro-batches.

    `composed`: the baseline before planning. `expected_s`: seconds per optimizer step by the time
    model. `progress` receives the number of sets considered and the total.
    """
    sections = {value: _sections(composed, value, config_dir) for axis in axes for value in axis}
    target = baseline.batch.samples_per_step
    before = findings(baseline.config, baseline.device, baseline.ranks.num_nodes)
    found: list[Candidate] = []
    refused: dict[str, int] = {}
    first, too_large = None, 0
    sets = combine(axes)
    for number, values in enumerate(sets):
        progress(number, len(sets))
        changed = {group: part for value in values for group, part in sections[value].items()}
        config = _with_target(replace(baseline.config, **changed), baseline, target)
        if config is None:
            continue
        batches, rule = _allowed_batches(baseline, config, before, changed)
        if not batches:
            refused[rule] = refused.get(rule, 0) + 1
            continue
        sizes = _candidates_by_batch(baseline, batches, values, expected_s)
        fitting = [each for each in sizes if each.point.verdict is not Verdict.does_not_fit]
        too_large += len(sizes) - len(fitting)
        is_typed = not any(value.overrides for value in values)
        # The baseline is always a candidate, also if it is not among the first sizes.
        for larger, each in enumerate(fitting):
            is_first = is_typed and each.point.micro_batch == baseline.batch.per_device
            first = len(found) if is_first else first
            found += [each] if is_first or larger < MAX_SIZES else []
    progress(len(sets), len(sets))
    return Candidates(found, first, len(sets), refused, too_large)


def _sections(composed: Composed, value: _Value, config_dir: Path | None) -> dict[str, Any]:
    if not value.overrides:
        return {}
    config = _composed(composed, value, config_dir)
    return {group: getattr(config, group) for group in map(group_of, value.overrides)}


def _composed(composed: Composed, value: _Value, config_dir: Path | None) -> Config:
    typed = drop_overrides(composed.overrides, value.overrides)
    return compose([*typed, *value.overrides], config_dir, in_sweep=True).config


def _with_target(config: Config, baseline: Plan, target: int) -> Config | None:
    """Return the same samples per step in open micro-batches, None if devices cannot share them."""
    kept = 1 if router_loss(config) is None else baseline.batch.per_device
    if target % (kept * config.ranks.num_processes):
        return None
    size = min(baseline.batch.per_device, target // config.ranks.num_processes)
    batch = replace(config.batch, option="fixed", target=target, accumulation=None, per_device=size)
    return replace(config, batch=batch)


def _allowed_batches(
    baseline: Plan, config: Config, before: RuleFindings, changed: Collection[str]
) -> tuple[list[Config], str]:
    """Return the configuration with each allowed micro-batch, smallest first, or the rule.

    A micro-batch is excluded if rules reject it or report no benefit, unless they also do so for
    the baseline. Rules only object to several samples in a micro-batch or to several micro-batches
    in a step. So all are allowed if the smallest and the largest are, and none if neither is.
    Forecasts exclude what does not fit.
    """

    def rule_against(config: Config) -> str:
        found = findings(config, baseline.device, config.ranks.num_nodes)
        problem = before.objection(found, changed, permit_unsafe=True)
        return "" if problem is None else problem.id or problem.key

    every = possible_batches(config)
    smallest, largest = rule_against(every[0]), rule_against(every[-1])
    if smallest and largest:
        return [], largest
    if smallest or largest:
        every = [each for each in every if not rule_against(each)]
    return every, ""


def _candidates_by_batch(
    baseline: Plan,
    batches: Sequence[Config],
    values: tuple[_Value, ...],
    expected_s: Callable[[Plan], float | None],
) -> list[Candidate]:
    """Return one set of techniques with each of its micro-batches, the largest first."""
    try:
        whole = replan(baseline, batches[0])
    except ConfigError:  # it conflicts with the user's own DeepSpeed configuration
        return []
    names = tuple(value.name for value in values)
    beside = tuple(
        (*names[:axis], other, *names[axis + 1 :])
        for axis, value in enumerate(values)
        for other in value.needless_beside
    )
    usual = math.prod(value.usual for value in values)
    cut = []
    for each in reversed(batches):
        plan = with_batch(whole, each, (), ())
        doublings = math.log2(plan.batch.per_device / baseline.batch.per_device)
        forecast = known_forecast(plan)
        point = Point(
            names,
            plan.batch.per_device,
            plan.batch.world_size * plan.batch.devices,
            search_verdict(forecast),
            forecast.peak.expected,
            expected_s(plan),
            usual * _PER_DOUBLING**doublings,
            compile_seconds(plan) / steps_to_pay(baseline),
            beside,
        )
        cut.append(Candidate(point, values, plan, forecast))
    return cut


_Key = tuple[str, str]
"""Group and key."""
_Settings = Mapping[_Key, Any]


def with_explicit_values(
    axis: _SearchAxis, baseline: Config, composed: Composed, own: Path | None
) -> _SearchAxis:
    """Return the axis with explicit values, without the value that equals the baseline.

    An option does not change keys that an experiment or a recipe sets: `memory=checkpointing` with
    `memory.every_n: 2` recomputes every second layer.
    """
    mine = {group_of(text) for value in axis for text in (value.name, *value.overrides)}
    open_groups = composed.choices.get("experiment", "none") == "none"
    if open_groups and not mine.intersection(map(group_of, composed.overrides)):
        return axis
    first, *others = axis
    by_name = replace(first, overrides=tuple(first.name.split()), usual=1.0)
    every = [by_name, *others]
    meant: dict[_Value, _Settings] = {}
    for value in every:
        groups = {*map(group_of, value.overrides)}
        settings = _plain(compose(value.overrides, own).config)
        meant[value] = {key: each for key, each in settings.items() if key[0] in groups}
    telling = _distinguishing_keys(list(meant.values()))
    now = _plain(baseline)
    keys = {value: telling & meant[value].keys() for value in every}
    typed = next((v for v in every if all(now[k] == meant[v][k] for k in keys[v])), None)
    if typed is None:
        typed = replace(by_name, name=f"{first.name}, as configured", needless_beside=())
    others = [_explicit(v, meant[v], telling, composed, own) for v in every if v is not typed]
    scaled = [replace(value, usual=value.usual / typed.usual) for value in others]
    return (replace(typed, overrides=(), usual=1.0), *scaled)


def _plain(config: Config) -> _Settings:
    content = make_converter().unstructure(config)
    sections = {group: part for group, part in content.items() if isinstance(part, dict)}
    return {(group, key): each for group, part in sections.items() for key, each in part.items()}


def _distinguishing_keys(meant: list[_Settings]) -> set[_Key]:
    """Return the keys that distinguish the values of an axis. Others, as a learning rate, stay."""
    first: dict[_Key, Any] = {}
    return {
        key
        for settings in meant
        for key, each in settings.items()
        if first.setdefault(key, each) != each and (key[0] != "optimizer" or key[1] == "option")
    }


def _explicit(
    value: _Value, meant: _Settings, telling: set[_Key], composed: Composed, own: Path | None
) -> _Value:
    """Return the value with an override for each key that would otherwise differ."""
    found = _plain(_composed(composed, value, own))
    more = tuple(
        f"{group}.{key}={format_value(meant[group, key])}"
        for group, key in sorted(telling & meant.keys())
        if key != "option" and found[group, key] != meant[group, key]
    )
    return replace(value, overrides=(*value.overrides, *more))
