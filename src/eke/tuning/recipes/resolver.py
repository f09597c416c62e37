"""Resolve an adaptive recipe: its questions in order, each answer checked by the rules.

No torch, no files: a recipe sees the configuration and the device.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from eke.common.errors import ConfigError
from eke.common.text import format_bytes
from eke.config.schema import Config
from eke.plan.planner import Plan, RecipeDecision
from eke.tuning.chooser import Change, RecipeOption, Situation, by_section


@dataclass(frozen=True)
class Question:
    """A question that a recipe answers."""

    decides: tuple[str, ...]
    """Groups and key paths: an override of one of them takes precedence."""
    candidates: tuple[RecipeOption, ...]
    """The best one first."""
    shrinks: bool = False
    """An answer is taken only if the forecast's peak is lower with it."""
    otherwise: str = ""
    """Why there is no candidate and the current value stays. If empty, nothing is reported."""


Ask = Callable[[Situation], Question | None]
"""A question; None where it does not arise."""
Search = Callable[[Situation, frozenset[str], Change], list[RecipeOption]]
"""A choice of several techniques at once; the second argument: what the user has decided."""


@dataclass(frozen=True)
class AdaptiveRecipe:
    """A named selection that adapts to the device, the model and the overrides."""

    name: str
    first: tuple[Ask, ...]
    """Questions about the device and the packages, resolved before planning."""
    then: tuple[Ask, ...]
    """Questions that look at the plan."""
    search: Search | None = None
    """Resolved last: changes needed to make it fit."""
    conclusion: Callable[[Situation], str] | None = None
    """Outcome for memory, as a separate row."""
    menu: tuple[tuple[str, ...], ...] = ()
    """Overrides that may come up: composed together, each section once, to save time."""


Sections = Callable[[tuple[str, ...]], Config]
"""Overrides -> the configuration with them; ConfigError if they contradict the given ones."""


@dataclass
class RecipeResolver:
    """The decisions of one recipe for one configuration."""

    recipe: AdaptiveRecipe
    claims: frozenset[str]
    """Groups and keys that the user has decided about."""
    compose: Sections
    decisions: list[RecipeDecision] = field(default_factory=list)
    _sections: dict[tuple[str, ...], object] = field(default_factory=dict)

    def settle(self, situation: Situation, make_base: Callable[[Config], Plan]) -> Situation:
        """The situation, without a plan yet, with every choice; ConfigError if it has no plan."""
        self._read_menu()
        situation = self._all(self.recipe.first, situation)
        if situation.found.rejected:
            return situation  # because of the overrides: the rules report it at planning
        situation = replace(situation, base=make_base(situation.smallest))
        situation = self._all(self.recipe.then, situation)
        if self.recipe.search is not None:
            for found in self.recipe.search(situation, self.claims, self.changed):
                situation = self.changed(situation, found.overrides) or situation
                self._note(found, found.reason)
        if self.recipe.conclusion is not None:
            self._say("memory forecast", self.recipe.conclusion(situation))
        return situation

    def changed(self, situation: Situation, overrides: tuple[str, ...]) -> Situation | None:
        """The situation with overrides; None if they conflict with the overrides."""
        parts: dict[str, Any] = {}
        try:
            for section, texts in by_section(overrides).items():
                if texts not in self._sections:
                    self._sections[texts] = getattr(self.compose(texts), section)
                made: Any = self._sections[texts]
                if section == "data":  # a recipe changes keys of it, and leaves the others
                    names = [text.partition("=")[0].partition(".")[2] for text in texts]
                    fields = {name: getattr(made, name) for name in names}
                    made = replace(getattr(situation.config, section), **fields)
                parts[section] = made
        except ConfigError:
            return None
        return replace(situation, config=replace(situation.config, **parts))

    def _all(self, questions: tuple[Ask, ...], situation: Situation) -> Situation:
        for ask in questions:
            question = ask(situation)
            if question is not None and self.claims.isdisjoint(question.decides):
                situation = self._answer(question, situation)
        return situation

    def _answer(self, question: Question, situation: Situation) -> Situation:
        """The first candidate that the rules let through; the reasons against those before it."""
        against = []
        for candidate in question.candidates:
            name, reason = " ".join(candidate.overrides), candidate.reason
            changed = self.changed(situation, candidate.overrides)
            if changed is None:
                against.append(f"{name} contradicts your overrides")
                continue
            if changed.config != situation.config:
                sections = by_section(candidate.overrides)
                problem = situation.found.objection(changed.found, sections)
                saved = smaller(situation, changed) if question.shrinks else ""
                if problem is not None or saved is None:
                    why = problem.why if problem else "it would need no less memory"
                    against.append(f"not {name}: {why}")
                    continue
                reason += f"; {saved}" if saved else ""
            self._note(candidate, "; ".join([reason, *against]))
            return changed
        reasons = against if question.candidates else [question.otherwise]
        if question.otherwise and reasons:
            group = question.decides[0]
            stays = f"{group}={getattr(situation.config, group).option}"
            self._say(stays, "; ".join(reasons))
        return situation

    def _note(self, candidate: RecipeOption, reason: str) -> None:
        first, *others = candidate.overrides
        keys = {text.partition("=")[0] for text in candidate.overrides}
        self.decisions = [each for each in self.decisions if each.key not in keys]
        self._say(first, reason)
        for text in others:
            self._say(text, f"with {first}")

    def _say(self, override: str, reason: str) -> None:
        key, _, value = override.partition("=")
        reason = f"recipe={self.recipe.name}: {reason}"
        self.decisions.append(RecipeDecision(key, value, reason))

    def _read_menu(self) -> None:
        """Compose what may come up, many sections at a time."""
        for overrides in self.recipe.menu:
            every = by_section(overrides)
            wanted = {name: texts for name, texts in every.items() if name not in self.claims}
            try:
                config = self.compose(tuple(text for texts in wanted.values() for text in texts))
            except ConfigError:
                continue  # one by one, then
            for section, texts in wanted.items():
                self._sections[texts] = getattr(config, section)


def smaller(before: Situation, after: Situation) -> str | None:
    """How much less a whole step's samples need; None where it is not less, or not known."""
    if before.forecast_whole is None or after.forecast_whole is None:
        return None
    old, new = before.forecast_whole.peak.expected, after.forecast_whole.peak.expected
    if new >= old:
        return None
    return f"{format_bytes(new)} expected instead of {format_bytes(old)}"
