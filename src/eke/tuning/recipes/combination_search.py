"""Several techniques chosen together: every combination that the rules let through, forecast."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from eke.common.units import format_bytes
from eke.estimate.memory import Forecast
from eke.tuning.recipes.question import Candidate, Change, Situation, by_section


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
