"""Choice of techniques for a configuration: permitted combinations in the order of their cost."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product, tee
from math import prod
from typing import Protocol, TypeVar

from eke.common.errors import ConfigError, Problem
from eke.common.text import format_bytes
from eke.config.schema import Config
from eke.estimate.memory import Forecast, Verdict, forecast
from eke.hardware import Device
from eke.plan.planner import Plan, possible_batches, replan
from eke.rules import NO_BENEFIT, NOT_BY_SIZE, WITHOUT_EFFECT, RuleInputs, check
from eke.rules.techniques import TECHNIQUES, Technique, group_of

_Key = tuple[str, str]
"""Rule and key. A rule may apply to several groups."""


@dataclass(frozen=True)
class RuleFindings:
    """Findings of the rules about one configuration."""

    rejected: Mapping[_Key, Problem]
    warned: Mapping[_Key, Problem]

    def objection(
        self, later: "RuleFindings", sections: Collection[str], permit_unsafe: bool = False
    ) -> Problem | None:
        """Return the first finding that a change adds, rejections first, None without one.

        A missing benefit only counts for the sections that it changes. `permit_unsafe` ignores
        warnings that a run may go wrong.
        """
        for key, problem in later.rejected.items():
            if key not in self.rejected:
                return problem
        for key, problem in later.warned.items():
            saves_nothing = problem.id in NO_BENEFIT
            counts = saves_nothing or not permit_unsafe or problem.id in WITHOUT_EFFECT
            own = not saves_nothing or group_of(problem.key) in sections
            if key not in self.warned and counts and own:
                return problem
        return None


def findings(config: Config, device: Device, num_nodes: int) -> RuleFindings:
    """Return the rules' findings in this environment, as if the device were present."""
    facts = RuleInputs(config, replace(device, present=True), planning=False, num_nodes=num_nodes)
    # A choice may make it fit, and the rules about size are slow.
    rejected, warned = check(facts, NOT_BY_SIZE)
    return RuleFindings({(p.id, p.key): p for p in rejected}, {(p.id, p.key): p for p in warned})


@dataclass(frozen=True)
class ChoiceContext:
    """Configuration and environment for which choices are made."""

    config: Config
    """Configuration with the choices so far."""
    device: Device
    num_nodes: int
    cores: int
    """CPU cores of this machine per process."""
    bfloat16_units: tuple[str, ...]
    """CPU flags of this machine for bfloat16, such as `avx512_bf16`."""
    base: Plan | None = None
    """Plan of the configuration without the recipe. None before planning."""

    @property
    def plan(self) -> Plan:
        """Base plan."""
        assert self.base is not None, "there is no plan yet"
        return self.base

    @cached_property
    def found(self) -> RuleFindings:
        """Findings of the rules about the current configuration."""
        return findings(self.config, self.device, self.num_nodes)

    @cached_property
    def smallest(self) -> Config:
        """Configuration, with the smallest micro-batch that rules allow for batch=auto."""
        return self._first_allowed(reverse=False)

    @cached_property
    def whole(self) -> Config:
        """Configuration, with the fewest micro-batches that rules allow for batch=auto."""
        return self._first_allowed(reverse=True)

    @cached_property
    def forecast(self) -> Forecast | None:
        """Forecast for the smallest micro-batch."""
        return self.forecast_of(self.smallest)

    @cached_property
    def forecast_whole(self) -> Forecast | None:
        """Forecast for the largest micro-batch."""
        return self.forecast_of(self.whole)

    def forecast_of(self, config: Config) -> Forecast | None:
        """Return the forecast by formulas, None without a plan. Traces would vary the choice."""
        try:
            return forecast(replan(self.plan, config))
        except ConfigError:
            return None

    def _first_allowed(self, reverse: bool) -> Config:
        if self.config.batch.per_device is not None:
            return self.config
        every = possible_batches(self.config)[:: -1 if reverse else 1]
        facts = self.device, self.num_nodes
        return next((each for each in every if not findings(each, *facts).rejected), every[0])


Change = Callable[[ChoiceContext, tuple[str, ...]], ChoiceContext | None]
"""Returns a situation with overrides, None if they conflict with the user's."""


@dataclass(frozen=True)
class RecipeOption:
    """One choice of a recipe."""

    overrides: tuple[str, ...]
    """Overrides of one or more sections. The first one names the decision."""
    reason: str
    """Reason in one clause, with numbers and their source."""


def by_section(overrides: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
    """Return the overrides by section, in their order."""
    groups = dict.fromkeys(map(group_of, overrides))
    return {group: tuple(o for o in overrides if group_of(o) == group) for group in groups}


class _Option(Protocol):
    @property
    def overrides(self) -> tuple[str, ...]: ...


_Chosen = TypeVar("_Chosen", bound=_Option)
_T = TypeVar("_T")


def combine(options: Sequence[Sequence[_Chosen]]) -> list[tuple[_Chosen, ...]]:
    """Return every combination with one option of each in which no group is decided twice."""
    found = []
    for each in product(*options):
        decided = [group for option in each for group in {*map(group_of, option.overrides)}]
        if len(decided) == len(set(decided)):  # a precision may include its optimizer
            found.append(each)
    return found


def first_that_fits_memory(
    options: Iterable[_T], forecast_of: Callable[[_T], Forecast]
) -> _T | None:
    """Return the first option (mildest first) that fits, else the first that may fit, else None."""
    tight = None
    for option in options:
        verdict = forecast_of(option).verdict
        if verdict is Verdict.fits:
            return option
        if verdict is Verdict.tight and tight is None:
            tight = option
    return tight


@dataclass(frozen=True)
class Axis:
    """Techniques of which at most one is chosen."""

    decides: tuple[str, ...]
    """Groups and keys of the axis. No technique is chosen if the user has set one of them."""
    techniques: tuple[Technique, ...]

    @classmethod
    def of(cls, decides: tuple[str, ...], *names: str) -> "Axis":
        """Return an axis of techniques of the table."""
        return cls(decides, tuple(TECHNIQUES[name] for name in names))


@dataclass(frozen=True)
class Combination:
    """Techniques that rules permit together."""

    techniques: tuple[Technique, ...]
    situation: ChoiceContext
    forecast: Forecast


def cost_of(techniques: Sequence[Technique]) -> tuple[int, float, int, int]:
    """Return the sort key: unknown slowdowns, step time, changes of the training, techniques."""
    slowdowns = [(each.cautious or each.published) for each in techniques]
    known = [each.slowdown for each in slowdowns if each is not None]
    changing = sum(not each.keeps_training for each in techniques)
    return len(techniques) - len(known), prod(known), changing, len(techniques)


ROOM = {Verdict.fits: 0, Verdict.tight: 1}
"""Order of equally good combinations by verdict. The rest comes last."""


class Chooser:
    """Permitted combinations of techniques, on axes that the user has not set."""

    def __init__(
        self, situation: ChoiceContext, claims: frozenset[str], change: Change, axes: Sequence[Axis]
    ) -> None:
        self.situation = situation
        self.change = change
        # Overrides of a technique -> why no combination has it.
        self.rejected: dict[tuple[str, ...], str] = {}
        open_axes = (axis for axis in axes if claims.isdisjoint(axis.decides))
        self.axes = [tuple(filter(self._is_permitted, axis.techniques)) for axis in open_axes]

    def combinations(self) -> Iterator[Combination]:
        """Yield each permitted combination that saves enough memory, the lowest cost first."""
        peaks: dict[tuple[Technique, ...], int] = {}
        none = Technique("", "")
        combined = combine([(none, *techniques) for techniques in self.axes])
        taken = [tuple(each for each in some if each is not none) for some in combined]
        for techniques in sorted(taken, key=cost_of):
            situation, _ = self._with_techniques(techniques)
            if situation is not None and situation.forecast is not None:
                peaks[techniques] = peak = situation.forecast.peak.expected
                kept = tuple(each for each in techniques if each.keeps_training)  # yielded before
                # Another training must lower the peak by a factor of 1.05.
                if kept == techniques or peaks.get(kept, 2 * peak) >= 1.05 * peak:
                    yield Combination(techniques, situation, situation.forecast)

    def mildest_that_fits(self) -> Combination | None:
        """Return the first that fits, may fit, or needs least. None if the memory is unknown."""
        if self.situation.device.memory_bytes is None:
            return None
        tried, every = tee(self.combinations())
        return first_that_fits_memory(tried, lambda each: each.forecast) or min(
            every, key=lambda each: each.forecast.peak.expected, default=None
        )

    def least_memory(self) -> Combination | None:
        """Return the mildest combination with the lowest forecast, None without forecasts."""
        every = list(self.combinations())
        least = min((each.forecast.peak.expected for each in every), default=0)
        # Within 1 % peaks are equal, given the error of formulas (docs/how-to/forecast.md).
        good = [each for each in every if each.forecast.peak.expected <= 1.01 * least]
        return min(good, key=lambda each: ROOM.get(each.forecast.verdict, len(ROOM)), default=None)

    def explained(self, combination: Combination) -> list[RecipeOption]:
        """Return each technique of a combination with its reason and the memory it saves."""
        return [
            RecipeOption(each.overrides, self._reason(combination, each))
            for each in combination.techniques
        ]

    def _reason(self, combination: Combination, technique: Technique) -> str:
        others = tuple(each for each in combination.techniques if each is not technique)
        without, _ = self._with_techniques(others)
        clauses = [technique.reason]
        if without is not None and without.forecast is not None:
            size = format_bytes(combination.forecast.peak.expected)
            before = format_bytes(without.forecast.peak.expected)
            clauses.append(f"{size} expected, {before} without it")
        better = next((axis for axis in self.axes if technique in axis), ())
        paths = {text.partition("=")[0] for each in better for text in each.overrides}
        for overrides, why in self.rejected.items():
            if overrides[0].partition("=")[0] in paths:
                clauses.append(f"not {' '.join(overrides)}: {why}")
        return "; ".join(clauses)

    def _with_techniques(self, techniques: Sequence[Technique]) -> tuple[ChoiceContext | None, str]:
        """Return the situation with techniques, or None and the reason for their rejection."""
        overrides = tuple(text for each in techniques for text in each.overrides)
        situation = self.change(self.situation, overrides)
        if situation is None:
            return None, "it conflicts with the overrides"
        problem = self.situation.found.objection(situation.found, by_section(overrides))
        return (situation, "") if problem is None else (None, problem.why)

    def _is_permitted(self, technique: Technique) -> bool:
        situation, why = self._with_techniques([technique])
        self.rejected |= {} if situation else {technique.overrides: why}
        return situation is not None
