"""What a search has found, as values: shown, written down and tested alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from eke.plan.record import Outcome
from eke.tuning.search.axes import Numerics
from eke.tuning.search.candidates import Candidate, Candidates
from eke.tuning.search.noise import deviation_between, typical
from eke.tuning.search.objective import Objective
from eke.tuning.search.search import Search
from eke.tuning.search.surrogate import NOISE
from eke.tuning.search.trials import OF_MEDIAN, Measured

LESS = 0.005
"""Share of the peak below which memory is called the same."""

Z_95 = 1.96
"""Standard errors on each side of a 95 % interval."""


@dataclass(frozen=True)
class Standing:
    """One candidate that was measured."""

    candidate: Candidate
    tried: tuple[Measured, ...]
    """Its trials with a step time, in their order."""
    between: float = 0.0
    """Standard deviation of the logarithm of a step time from trial to trial of one configuration,
    as those that were repeated show it."""

    @property
    def logarithms(self) -> list[float]:
        """Of the trials' seconds per optimizer step."""
        return [math.log(each.trial.step_s) for each in self.tried if each.trial.step_s]

    @property
    def step_s(self) -> float:
        """Seconds per optimizer step, its share of compiling included: median of trials."""
        return math.exp(typical(self.logarithms))

    @property
    def error(self) -> float:
        """Standard error of its logarithm."""
        count = len(self.tried)
        one = typical([max(each.trial.spread, self.between, NOISE) for each in self.tried])
        return one * (OF_MEDIAN if count > 2 else 1.0) / math.sqrt(count)  # of two it is the mean

    @property
    def samples_per_s(self) -> float:
        """Over all devices."""
        return self.candidate.plan.batch.samples_per_step / self.step_s

    @property
    def peak_bytes(self) -> int | None:
        """The highest measured peak of one device."""
        return max((each.trial.peak_bytes or 0 for each in self.tried), default=0) or None


@dataclass(frozen=True)
class Gain:
    """The best configuration over what was typed."""

    factor: float
    """Of the objective: 2 is twice as fast, or half the memory, or half the cost."""
    low: float
    """Of a 95 % interval of `factor`; of memory, which hardly varies, the same."""
    high: float
    of: Objective
    """What it is a gain in: a search for less memory may end at a faster step with as much."""

    @property
    def is_resolved(self) -> bool:
        """Whether it is more than chance."""
        return self.low > 1


@dataclass(frozen=True)
class Fit:
    """The end of a search."""

    objective: Objective
    numerics: Numerics
    candidates: Candidates
    trials: tuple[Measured, ...]
    standings: tuple[Standing, ...]
    """The best first."""
    typed: Standing | None
    """What was typed; None where it could not be measured."""
    between: float = 0.0
    """As in each standing."""
    further_gain: float = 0.0
    """Share of the objective that one more trial was expected to gain; 0 where that is not worth
    it."""

    @property
    def diverges(self) -> bool:
        """What was typed diverges, whatever else is chosen."""
        return all_diverge(self.trials, self.candidates.first, self.numerics)

    @property
    def best(self) -> Standing | None:
        """The best that was measured."""
        return self.standings[0] if self.standings else None

    @property
    def gain(self) -> Gain | None:
        """Over what was typed; None where nothing was measured, or what was typed was not."""
        return None if self.typed is None else self.gain_over(self.typed)

    @property
    def is_found(self) -> bool:
        """Whether the best is worth an option.

        Better than what was typed by more than chance, or that could not be measured.
        """
        if self.best is None or self.best is self.typed:
            return False
        return self.gain is None or self.gain.is_resolved

    @property
    def rivals(self) -> list[Standing]:
        """Others than what was typed that trials do not tell from the best."""
        others = [each for each in self.standings[1:] if each is not self.typed]
        gains = [(each, self.gain_over(each)) for each in others]
        return [each for each, gain in gains if gain is not None and not gain.is_resolved]

    def gain_over(self, before: Standing) -> Gain | None:
        """Of the best over another configuration; None where that was not measured."""
        after = self.best
        if after is None:
            return None
        if self.objective is Objective.memory:
            if not before.peak_bytes or not after.peak_bytes:
                return None
            factor = before.peak_bytes / after.peak_bytes
            if after is before or factor >= 1 + LESS:
                return Gain(factor, factor, factor, self.objective)
        devices = 1.0
        if self.objective is Objective.cost:
            devices = before.candidate.point.devices / after.candidate.point.devices
        factor = devices * before.step_s / after.step_s
        of = Objective.cost if self.objective is Objective.cost else Objective.speed
        if after is before:
            return Gain(1.0, 1.0, 1.0, of)
        error = Z_95 * math.hypot(before.error, after.error)
        return Gain(factor, factor * math.exp(-error), factor * math.exp(error), of)


def all_diverge(trials: Sequence[Measured], typed: int | None, numerics: Numerics) -> bool:
    """Whether what was typed diverged, and every candidate computes the same but for rounding.

    Args:
        trials: so far.
        typed: number of the candidate that was typed; None where it cannot run.
        numerics: what candidates may differ in.
    """
    ended = {each.outcome for each in trials if each.number == typed}
    return numerics is Numerics.same and Outcome.diverged.value in ended


def fit_of(
    search: Search, candidates: Candidates, trials: Sequence[Measured], numerics: Numerics
) -> Fit:
    """What a finished search has found."""
    standings = {
        number: Standing(
            candidates.found[number],
            tuple(each for each in trials if each.number == number and each.trial.step_s),
        )
        for number in search.ranking()
    }
    between = deviation_between([each.logarithms for each in standings.values()])
    standings = {number: replace(each, between=between) for number, each in standings.items()}
    first = None if candidates.first is None else standings.get(candidates.first)
    return Fit(
        search.objective,
        numerics,
        candidates,
        tuple(trials),
        tuple(standings.values()),
        first,
        between,
        search.further_gain(),
    )
