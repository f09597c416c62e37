"""Resolution of an adaptive recipe: questions in order, answers checked by rules, without torch."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from eke.common.errors import ConfigError
from eke.common.text import format_bytes
from eke.config.schema import Config
from eke.plan.planner import Plan, RecipeDecision
from eke.tuning.recipe_search import Change, ChoiceContext, RecipeOption, by_section


@dataclass(frozen=True)
class Question:
    """A decision that a recipe may make."""

    decides: tuple[str, ...]
    """Groups and keys of the decision. An override of one of them takes precedence."""
    candidates: tuple[RecipeOption, ...]
    """Possible answers, the best first."""
    shrinks: bool = False
    """True if an answer must lower the forecast's peak."""
    otherwise: str = ""
    """Reason for the current value without candidates. Empty: no kept value is reported."""


_Ask = Callable[[ChoiceContext], Question | None]
"""Returns a question, None if it does not apply."""


@dataclass(frozen=True)
class AdaptiveRecipe:
    """A recipe that adapts to the device, the model and the overrides."""

    name: str
    first: tuple[_Ask, ...]
    """Questions about the device and the packages, answered before planning."""
    then: tuple[_Ask, ...]
    """Questions about the plan."""
    search: Callable[[ChoiceContext, frozenset[str], Change], list[RecipeOption]] | None = None
    """Chooses all changes needed to fit, after all questions, given what the user has set."""
    conclusion: Callable[[ChoiceContext], str] | None = None
    """Returns the memory result, shown as a separate row."""
    menu: tuple[tuple[str, ...], ...] = ()
    """Overrides that may be chosen, composed together to save time, each section once."""


@dataclass
class RecipeResolver:
    """Decisions of one recipe for one configuration."""

    recipe: AdaptiveRecipe
    claims: frozenset[str]
    """Groups and keys set by the user."""
    compose: Callable[[tuple[str, ...]], Config]
    """Returns a configuration with overrides. Raises ConfigError if they conflict with others."""
    decisions: list[RecipeDecision] = field(default_factory=list)
    _sections: dict[tuple[str, ...], object] = field(default_factory=dict)

    def choose_all(
        self, situation: ChoiceContext, make_base: Callable[[Config], Plan]
    ) -> ChoiceContext:
        """Return the situation with every choice and a plan. Raise ConfigError without a plan."""
        self._read_menu()
        situation = self._all(self.recipe.first, situation)
        if situation.found.rejected:
            return situation  # rejected because of the overrides: planning reports it
        situation = replace(situation, base=make_base(situation.smallest))
        situation = self._all(self.recipe.then, situation)
        if self.recipe.search is not None:
            for found in self.recipe.search(situation, self.claims, self.changed):
                situation = self.changed(situation, found.overrides) or situation
                self._note(found, found.reason)
        if self.recipe.conclusion is not None:
            self._say("memory forecast", self.recipe.conclusion(situation))
        return situation

    def changed(self, situation: ChoiceContext, overrides: tuple[str, ...]) -> ChoiceContext | None:
        """Return the situation with overrides, None if they conflict with the user's."""
        parts: dict[str, Any] = {}
        try:
            for section, texts in by_section(overrides).items():
                if texts not in self._sections:
                    self._sections[texts] = getattr(self.compose(texts), section)
                made: Any = self._sections[texts]
                if section == "data":  # a recipe only changes some of its keys
                    names = [text.partition("=")[0].partition(".")[2] for text in texts]
                    fields = {name: getattr(made, name) for name in names}
                    made = replace(getattr(situation.config, section), **fields)
                parts[section] = made
        except ConfigError:
            return None
        return replace(situation, config=replace(situation.config, **parts))

    def _all(self, questions: tuple[_Ask, ...], situation: ChoiceContext) -> ChoiceContext:
        for ask in questions:
            question = ask(situation)
            if question is not None and self.claims.isdisjoint(question.decides):
                situation = self._answer(question, situation)
        return situation

    def _answer(self, question: Question, situation: ChoiceContext) -> ChoiceContext:
        """Apply the first permitted candidate. Note its reason and those against earlier ones."""
        against = []
        for candidate in question.candidates:
            name, reason = " ".join(candidate.overrides), candidate.reason
            changed = self.changed(situation, candidate.overrides)
            if changed is None:
                against.append(f"{name} conflicts with the overrides")
                continue
            if changed.config != situation.config:
                sections = by_section(candidate.overrides)
                problem = situation.found.objection(changed.found, sections)
                saved = _smaller(situation, changed) if question.shrinks else ""
                if problem is not None or saved is None:
                    why = problem.why if problem else "no forecast shows that it saves memory"
                    against.append(f"not {name}: {why}")
                    continue
                reason += f"; {saved}" if saved else ""
            self._note(candidate, "; ".join([reason, *against]))
            return changed
        reasons = against if question.candidates else [question.otherwise]
        if question.otherwise and reasons:
            group = question.decides[0]
            self._say(f"{group}={getattr(situation.config, group).option}", "; ".join(reasons))
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
        self.decisions.append(RecipeDecision(key, value, f"recipe={self.recipe.name}: {reason}"))

    def _read_menu(self) -> None:
        """Compose the overrides that may be chosen, many sections at a time."""
        for overrides in self.recipe.menu:
            every = by_section(overrides)
            wanted = {name: texts for name, texts in every.items() if name not in self.claims}
            try:
                config = self.compose(tuple(text for texts in wanted.values() for text in texts))
            except ConfigError:
                continue  # they are composed one by one if chosen
            for section, texts in wanted.items():
                self._sections[texts] = getattr(config, section)


def _smaller(before: ChoiceContext, after: ChoiceContext) -> str | None:
    """Return the peak before and after, for the largest micro-batch, None if not lower."""
    if before.forecast_whole is None or after.forecast_whole is None:
        return None
    old, new = before.forecast_whole.peak.expected, after.forecast_whole.peak.expected
    if new >= old:
        return None
    return f"{format_bytes(new)} expected instead of {format_bytes(old)}"
