"""A recipe's questions answered one after the other, each answer shown to the rules first.

Several techniques chosen together: every combination that the rules let through, forecast.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from eke.common.errors import ConfigError
from eke.common.text import format_bytes
from eke.config.schema import Config
from eke.estimate.memory import Forecast
from eke.plan.planner import Plan, RecipeDecision
from eke.tuning.recipes.question import (
    Ask,
    Candidate,
    Change,
    Choice,
    Recipe,
    Situation,
    Wish,
    by_section,
)

SHARED = ("data",)
"""Sections of which a recipe changes keys, and the rest belongs to somebody else."""

Sections = Callable[[tuple[str, ...]], Config]
"""Overrides -> the whole configuration with them, composed as if they had been typed.

Raises ConfigError where they cannot be composed with what was typed.
"""


@dataclass
class Kitchen:
    """Where the choices of one recipe for one configuration are made."""

    recipe: Recipe
    claims: frozenset[str]
    compose: Sections
    choices: list[Choice] = field(default_factory=list)
    _sections: dict[tuple[str, ...], object] = field(default_factory=dict)

    def settle(self, situation: Situation, make_base: Callable[[Config], Plan]) -> Situation:
        """All questions, in order; the situation with every choice.

        Args:
            situation: without a plan.
            make_base: plans a configuration that no rule refuses.

        Raises:
            ConfigError: the configuration cannot be planned, with or without the recipe.
        """
        self._read_menu()
        situation = self._all(self.recipe.first, situation)
        if situation.found.refused:
            return situation  # by what was typed: the rules say so when it is planned
        situation = replace(situation, base=make_base(situation.smallest))
        situation = self._all(self.recipe.then, situation)
        if self.recipe.search is not None:
            for found in self.recipe.search(situation, self.is_decided, self.changed):
                changed = self.changed(situation, found.overrides) or situation
                self._note(found, found.reason)
                situation = changed
        if self.recipe.conclusion is not None:
            self._say("memory forecast", self.recipe.conclusion(situation), is_new=False)
        return situation

    def is_decided(self, path: str) -> bool:
        """Whether the user has decided about a group or a key."""
        return path in self.claims

    def changed(self, situation: Situation, overrides: tuple[str, ...]) -> Situation | None:
        """The situation with overrides; None where they do not go with what was typed."""
        parts: dict[str, Any] = {}
        try:
            for section, texts in by_section(overrides).items():
                made = self._section(section, texts)
                if section in SHARED:
                    names = [text.partition("=")[0].partition(".")[2] for text in texts]
                    fields = {name: getattr(made, name) for name in names}
                    made = replace(getattr(situation.config, section), **fields)
                parts[section] = made
        except ConfigError:
            return None
        return replace(situation, config=replace(situation.config, **parts))

    def _all(self, questions: tuple[Ask, ...], situation: Situation) -> Situation:
        for ask in questions:
            wish = ask(situation)
            if wish is not None and not any(map(self.is_decided, wish.decides)):
                situation = self._answer(wish, situation)
        return situation

    def _answer(self, wish: Wish, situation: Situation) -> Situation:
        """The first candidate that the rules let through; the reasons against those before it."""
        against = []
        for candidate in wish.candidates:
            changed = self.changed(situation, candidate.overrides)
            if changed is None:
                against.append(f"{name_of(candidate)} does not go with what was typed")
                continue
            if changed.config == situation.config:
                self._note(candidate, "; ".join([candidate.reason, *against]))
                return situation
            sections = by_section(candidate.overrides)
            problem = situation.found.new_in(changed.found, sections)
            if problem is not None:
                against.append(f"not {name_of(candidate)}: {problem.why}")
                continue
            reason = candidate.reason
            if wish.shrinks:
                told = smaller(situation, changed)
                if told is None:
                    against.append(f"not {name_of(candidate)}: it would need no less memory")
                    continue
                reason = f"{reason}; {told}"
            self._note(candidate, "; ".join([reason, *against]))
            return changed
        reasons = against if wish.candidates else [wish.otherwise]
        if wish.otherwise and reasons:
            group = wish.decides[0]
            stays = f"{group}={getattr(situation.config, group).option}"
            self._say(stays, "; ".join(reasons), is_new=False)
        return situation

    def _note(self, candidate: Candidate, reason: str) -> None:
        first, *others = candidate.overrides
        keys = {text.partition("=")[0] for text in candidate.overrides}
        self.choices = [each for each in self.choices if each.decision.key not in keys]
        self._say(first, reason)
        for text in others:
            self._say(text, f"with {first}")

    def _say(self, override: str, reason: str, is_new: bool = True) -> None:
        key, _, value = override.partition("=")
        decision = RecipeDecision(key, value, f"recipe={self.recipe.name}: {reason}")
        self.choices.append(Choice(override if is_new else "", decision))

    def _section(self, section: str, texts: tuple[str, ...]) -> object:
        if texts not in self._sections:
            self._sections[texts] = getattr(self.compose(texts), section)
        return self._sections[texts]

    def _read_menu(self) -> None:
        """Compose what may come up, many sections at a time."""
        for overrides in self.recipe.menu:
            wanted: Mapping[str, tuple[str, ...]] = {
                section: texts
                for section, texts in by_section(overrides).items()
                if not self.is_decided(section)
            }
            try:
                config = self.compose(tuple(text for texts in wanted.values() for text in texts))
            except ConfigError:
                continue  # one by one, then
            for section, texts in wanted.items():
                self._sections[texts] = getattr(config, section)


def name_of(candidate: Candidate) -> str:
    """A candidate in a sentence."""
    return " ".join(candidate.overrides)


def smaller(before: Situation, after: Situation) -> str | None:
    """How much less a whole step's samples need; None where it is not less, or not known."""
    if before.forecast_whole is None or after.forecast_whole is None:
        return None
    old, new = before.forecast_whole.peak.expected, after.forecast_whole.peak.expected
    if new >= old:
        return None
    return f"{format_bytes(new)} expected instead of {format_bytes(old)}"


@dataclass(frozen=True)
class Way:
    """One technique, and what it costs."""

    overrides: tuple[str, ...]
    slowdown: float | None
    """Time of a step over what it is without; None where nobody has published it."""
    reason: str
    """What it does, and where the slowdown is known from."""
    keeps: bool = True
    """The training computes the same, but for rounding of 16-bit operands."""


@dataclass(frozen=True)
class Axis:
    """Techniques of which one at most is taken."""

    decides: tuple[str, ...]
    """Groups and keys: where one of them was typed, none is taken."""
    ways: tuple[Way, ...]


@dataclass(frozen=True)
class Mix:
    """A combination."""

    ways: tuple[Way, ...]
    situation: Situation
    forecast: Forecast

    @property
    def cost(self) -> tuple[int, float, int, int]:
        """How many costs are unknown, the time of a step, what changes the training, how much."""
        return cost_of(self.ways)


def cost_of(ways: Sequence[Way]) -> tuple[int, float, int, int]:
    """The rank of a combination, the mildest first."""
    known = [way.slowdown for way in ways if way.slowdown is not None]
    changing = sum(not way.keeps for way in ways)
    return len(ways) - len(known), prod(known), changing, len(ways)


@dataclass
class Mixer:
    """Combinations of axes for one situation."""

    situation: Situation
    change: Change
    axes: list[Axis]
    refused: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Overrides of a way -> why no combination has it."""

    @classmethod
    def of(
        cls,
        situation: Situation,
        is_decided: Callable[[str], bool],
        change: Change,
        axes: Sequence[Axis],
    ) -> "Mixer":
        """With the axes that the user has left open, and the ways that rules let through alone."""
        mixer = cls(situation, change, [])
        for axis in axes:
            if any(map(is_decided, axis.decides)):
                continue
            mixer.axes.append(Axis(axis.decides, tuple(w for w in axis.ways if mixer._allowed(w))))
        return mixer

    def mixes(self) -> Iterator[Mix]:
        """Every combination that rules let through, the mildest first."""
        choices = [(None, *axis.ways) for axis in self.axes]
        combined = [tuple(way for way in each if way is not None) for each in product(*choices)]
        for ways in sorted(combined, key=cost_of):
            situation = self._with(ways)
            if situation is not None and situation.forecast is not None:
                yield Mix(ways, situation, situation.forecast)

    def told(self, mix: Mix) -> list[Candidate]:
        """The techniques of a mix, each with what it saves beside the others."""
        return [self._told(mix, way) for way in mix.ways]

    def _told(self, mix: Mix, way: Way) -> Candidate:
        others = tuple(each for each in mix.ways if each is not way)
        without = self._with(others)
        words = [way.reason]
        if without is not None and without.forecast is not None:
            with_it, before = mix.forecast.peak.expected, without.forecast.peak.expected
            words.append(f"{format_bytes(with_it)} expected, {format_bytes(before)} without it")
        better = next((a.ways for a in self.axes if way in a.ways), ())
        paths = {text.partition("=")[0] for each in better for text in each.overrides}
        for overrides, why in self.refused.items():
            if overrides[0].partition("=")[0] in paths:
                words.append(f"not {' '.join(overrides)}: {why}")
        return Candidate(way.overrides, "; ".join(words))

    def _with(self, ways: Sequence[Way]) -> Situation | None:
        """None where two ways say different things, or a rule refuses them together."""
        texts: dict[str, str] = {}
        for way in ways:
            for text in way.overrides:
                key, _, value = text.partition("=")
                if texts.setdefault(key, value) != value:
                    return None
        situation = self.change(self.situation, tuple(f"{k}={v}" for k, v in texts.items()))
        if situation is None:
            return None
        sections = by_section(tuple(texts))
        return None if self.situation.found.new_in(situation.found, sections) else situation

    def _allowed(self, way: Way) -> bool:
        situation = self.change(self.situation, way.overrides)
        if situation is None:
            self.refused[way.overrides] = "it does not go with what was typed"
            return False
        problem = self.situation.found.new_in(situation.found, by_section(way.overrides))
        if problem is not None:
            self.refused[way.overrides] = problem.why
        return problem is None
