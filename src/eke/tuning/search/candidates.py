"""Every configuration that could be tried: refused by rules, cut to what has room; no torch."""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError
from eke.config.compose import Composed, compose
from eke.config.schema import Config
from eke.estimate.memory import Forecast, Verdict, known_forecast
from eke.estimate.time import compile_seconds
from eke.plan.planner import Plan, possible_batches, replan, with_batch
from eke.rules import NO_BENEFIT, NOT_BY_SIZE, WITHOUT_EFFECT, Facts, check
from eke.tuning.search.axes import PER_DOUBLING, Axis, Value, group_of
from eke.tuning.search.search_space import Point, Room
from eke.tuning.search.trials import without

MAX_SIZES = 6
"""Micro-batches of one set of techniques that are looked at, the largest with room: a step is cut
into as few pieces as possible, unless less memory is the aim or smaller pieces stay in a cache."""

_ROOMS = {Verdict.fits: Room.fits, Verdict.tight: Room.tight, Verdict.does_not_fit: Room.none}


def room_of(forecast: Forecast) -> Room:
    """What a forecast's verdict means to a search; an unknown device's memory is no hindrance."""
    return _ROOMS.get(forecast.verdict, Room.fits)


@dataclass(frozen=True)
class Candidate:
    """One configuration that rules allow."""

    point: Point
    values: tuple[Value, ...]
    plan: Plan
    """For forecasts; the run itself is planned again from what is typed."""
    forecast: Forecast

    @property
    def overrides(self) -> tuple[str, ...]:
        """What makes it of what was typed, the micro-batch included."""
        own = (text for value in self.values for text in value.overrides)
        return (*own, *cut_overrides(self.plan))


def cut_overrides(plan: Plan) -> tuple[str, ...]:
    """How a plan cuts its samples into micro-batches, to be typed."""
    return (
        f"batch.per_device={plan.batch.per_device}",
        f"batch.target={plan.batch.samples_per_step}",
        "batch.accumulation=null",
    )


@dataclass(frozen=True)
class Candidates:
    """All of them, and what became of the others."""

    found: list[Candidate]
    first: int | None
    """Number of what was typed; None where it cannot run."""
    num_sets: int
    """Sets of techniques that were looked at."""
    refused: dict[str, int]
    """Rule -> sets of techniques that it refused."""
    too_large: int
    """Configurations that rules allow and that cannot fit."""


def enumerate_candidates(
    baseline: Plan,
    composed: Composed,
    axes: Sequence[Axis],
    config_dir: Path | None,
    expected_s: Callable[[Plan], float | None],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Candidates:
    """All combinations of the axes' values, each with its micro-batches.

    Args:
        baseline: what was typed, planned.
        composed: the same before its plan.
        axes: what may be varied.
        config_dir: a folder with the user's own options.
        expected_s: the time model: seconds per optimizer step.
        progress: told how many sets of techniques of how many are looked at.
    """
    every = [value for axis in axes for value in axis.values]
    sections = {value: _sections(composed, value, config_dir) for value in every}
    target = baseline.batch.samples_per_step
    typed = _objections(baseline, baseline.config, ())
    found: list[Candidate] = []
    refused: dict[str, int] = {}
    first, too_large = None, 0
    product = itertools.product(*(axis.values for axis in axes))
    sets = [values for values in product if not _contradict(values)]
    for number, values in enumerate(sets):
        progress(number, len(sets))
        changed: dict[str, Any] = {}
        for value in values:
            changed |= sections[value]
        config = _with_target(replace(baseline.config, **changed), baseline, target)
        if config is None:
            continue
        batches, rule = _allowed(baseline, config, typed, changed)
        if not batches:
            refused[rule] = refused.get(rule, 0) + 1
            continue
        sizes = _cut(baseline, batches, values, expected_s)
        fitting = [each for each in sizes if each.point.room is not Room.none]
        too_large += len(sizes) - len(fitting)
        is_typed = not any(value.overrides for value in values)
        for each in _largest(fitting, baseline.batch.per_device if is_typed else None):
            if is_typed and each.point.micro_batch == baseline.batch.per_device:
                first = len(found)
            found.append(each)
    progress(len(sets), len(sets))
    return Candidates(found, first, len(sets), refused, too_large)


def _contradict(values: Sequence[Value]) -> bool:
    """Whether two of them decide the same group, such as bfloat16 weights with their optimizer."""
    decided = [group for value in values for group in {*map(group_of, value.overrides)}]
    return len(decided) > len(set(decided))


def _sections(composed: Composed, value: Value, config_dir: Path | None) -> dict[str, Any]:
    """Sections of the configuration that a value changes."""
    if not value.overrides:
        return {}
    typed = without(composed.overrides, value.overrides)
    config = compose([*typed, *value.overrides], config_dir, in_sweep=True).config
    return {group: getattr(config, group) for group in map(group_of, value.overrides)}


def _with_target(config: Config, baseline: Plan, target: int) -> Config | None:
    """The same samples per step, with an open micro-batch; None where devices cannot share them."""
    if target % config.distributed.num_processes:
        return None
    size = min(baseline.batch.per_device, target // config.distributed.num_processes)
    batch = replace(config.batch, option="fixed", target=target, accumulation=None, per_device=size)
    return replace(config, batch=batch)


Objections = dict[tuple[str, str], str]
"""Rule and path -> the rule, or the path where it is none's."""


def _objections(baseline: Plan, config: Config, changed: Collection[str]) -> Objections:
    """What the rules have against a trial here, packages included.

    Args:
        baseline: what was typed, planned.
        config: of the trial.
        changed: sections of it that a search has chosen.
    """
    device = replace(baseline.device, present=True)
    facts = Facts(config, device, planning=False, num_nodes=config.distributed.num_nodes)
    refused, warned = check(facts, NOT_BY_SIZE)
    saves_nothing = [
        each
        for each in warned
        if each.rule in WITHOUT_EFFECT
        or (each.rule in NO_BENEFIT and each.path.partition(".")[0] in changed)
    ]
    return {(each.rule, each.path): each.rule or each.path for each in (*refused, *saves_nothing)}


def _allowed(
    baseline: Plan, config: Config, typed: Objections, changed: Collection[str]
) -> tuple[list[Config], str]:
    """The configuration with each micro-batch that rules allow, the smallest first; else the rule.

    Left out is what a rule refuses, or says to save nothing, and had not of what was typed. Rules
    object to samples that share a micro-batch or to a step of several: what neither the smallest
    nor the largest breaks, none between does. What does not fit is left to forecasts.
    """

    def rule_against(config: Config) -> str:
        found = _objections(baseline, config, changed)
        return next((rule for key, rule in found.items() if key not in typed), "")

    every = possible_batches(config)
    smallest, largest = rule_against(every[0]), rule_against(every[-1])
    if smallest and largest:
        return [], largest
    if smallest or largest:
        every = [each for each in every if not rule_against(each)]
    return every, ""


def _cut(
    baseline: Plan,
    batches: Sequence[Config],
    values: tuple[Value, ...],
    expected_s: Callable[[Plan], float | None],
) -> list[Candidate]:
    """One set of techniques with each of its micro-batches, the largest first."""
    try:
        whole = replan(baseline, batches[0])
    except ConfigError:  # the user's own DeepSpeed configuration contradicts it
        return []
    names = tuple(value.name for value in values)
    beside = tuple(_with_less_work(values))
    cut = []
    for each in reversed(batches):
        plan = with_batch(whole, each, (), ())
        forecast = known_forecast(plan)
        point = Point(
            names,
            plan.batch.per_device,
            plan.batch.world_size * plan.batch.devices,
            room_of(forecast),
            forecast.best.expected,
            expected_s(plan),
            _usual(values, plan.batch.per_device / baseline.batch.per_device),
            compile_seconds(plan) / baseline.steps.total,
            beside,
        )
        cut.append(Candidate(point, values, plan, forecast))
    return cut


def _with_less_work(values: tuple[Value, ...]) -> Iterator[tuple[str, ...]]:
    """Names of the sets of values that compute the same with fewer operations."""
    names = [value.name for value in values]
    for axis, value in enumerate(values):
        for other in value.needless_beside:
            yield (*names[:axis], other, *names[axis + 1 :])


def _usual(values: tuple[Value, ...], larger: float) -> float:
    """Time of a step over that of what was typed, whose micro-batch is so many times larger."""
    techniques = math.prod(value.usual for value in values)
    return float(techniques * PER_DOUBLING ** math.log2(larger))


def _largest(cut: Sequence[Candidate], typed: int | None) -> list[Candidate]:
    """The largest micro-batches, and the one that was typed."""
    kept = list(cut[:MAX_SIZES])
    return kept + [each for each in cut[MAX_SIZES:] if each.point.micro_batch == typed]
