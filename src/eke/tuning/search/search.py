"""Search algorithm: the next trial and the best configuration, without plans and processes.

Trials are chosen by expected improvement (Jones, Schonlau and Welch 1998,
doi:10.1023/A:1008306431147). Configurations known to be slow, or known well, are not tried.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from eke.estimate.memory import Verdict
from eke.plan.record import Outcome, Record
from eke.tuning.search.search_space import (
    MAX_REPEAT_STD,
    MOST,
    NOISE,
    Array,
    Objective,
    Point,
    Surrogate,
    Trial,
    deviation,
    expected_improvement,
    probability_informative,
    shares,
)

_MIN_EXPECTED_IMPROVEMENT = 0.003
"""Expected improvement below which the search stops: a third of a percent."""

_CLOSE = 0.03
"""A second configuration whose score is within this of the best is also confirmed."""


@dataclass
class Search:
    """State of a search."""

    points: list[Point]
    objective: Objective
    budget: int
    """Most trials, including confirming trials."""
    first: int | None
    """Index of the baseline. None if it cannot run."""
    trials: list[tuple[int, Trial]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._surrogate = Surrogate(self.points)

    def tell(self, number: int, trial: Trial) -> None:
        """Record a trial. A point may have several."""
        self.trials.append((number, trial))
        limit = self.points[number].peak_bytes
        for other, point in enumerate(self.points if trial.ran_out else []):
            # Also exclude points whose expected peak is as high.
            as_much = limit is not None and (point.peak_bytes or 0) >= limit
            if other == number or as_much:
                self.points[other] = replace(point, verdict=Verdict.does_not_fit)

    @property
    def left(self) -> int:
        """Trials left in the budget."""
        return self.budget - len(self.trials)

    def next(self, count: int = 1) -> list[int]:
        """Return the indices of at most `count` points to try now, none if not worthwhile.

        Each further point is chosen as if the previous ones had turned out as expected (Ginsbourger
        et al. 2010, "kriging believer").
        """
        chosen: list[int] = []
        room = self.left - (self.budget > 2)  # one trial is reserved for confirming the best
        if self.first is not None and not self.trials and room > 0:
            chosen.append(self.first)
        while len(chosen) < min(count, room) and (found := self._most_promising(chosen)):
            chosen.append(found[0])
        return chosen

    def to_confirm(self) -> list[int]:
        """Return the points to try again: the best, a rival, the baseline, inconsistent ones."""
        ranked = self.ranking()
        if not ranked or self.left < 1:
            return []
        scores = [self._found(number) for number in ranked[:2]]
        rivals = len(scores) == 2 and scores[1] - scores[0] < _CLOSE * self.objective.weight
        again = ranked[: 2 if rivals else 1]
        if self.first in ranked and self.first not in again:
            again.append(self.first)
        # Trials that disagree, of which the fastest is close to the best.
        reach = scores[0] + _CLOSE * self.objective.weight
        unclear = [n for n in ranked if n not in again and self._disagree(n)]
        again += [n for n in unclear if self._score(n, min(self._logarithms(n))) < reach]
        return [n for n in again if len(self._logarithms(n)) == 1 or self._disagree(n)][: self.left]

    def ranking(self) -> list[int]:
        """Return the measured points, the best first."""
        tried = {number for number, trial in self.trials if trial.step_s is not None}
        return sorted(tried, key=self._found)

    def by_expectation(self) -> list[int]:
        """Return the points that may fit, by expected score given the trials, the best first."""
        mean, _ = self._times(())
        chances = probability_informative(self.points, self.trials, self.objective)
        able = np.flatnonzero(chances).tolist()
        return sorted(able, key=lambda number: self._score(number, float(mean[number])))

    def expected_s(self) -> list[float]:
        """Return the expected seconds per step of each point, given the trials."""
        mean, _ = self._times(())
        return [float(seconds) for seconds in np.exp(mean)]

    def further_gain(self) -> float:
        """Return the expected gain in score of one more trial (0.02: 2 % faster), 0 if too low."""
        found = self._most_promising(())
        return found[1] if found and found[1] > _MIN_EXPECTED_IMPROVEMENT else 0.0

    def _most_promising(self, chosen: Sequence[int]) -> tuple[int, float] | None:
        """Return the point with the highest expected improvement, None if it is too low."""
        mean, deviation = self._times(chosen)
        scores = np.array([self._score(n, value) for n, value in enumerate(mean)])
        tried = {*self.ranking(), *chosen}
        # Before any measurement, the point with the best expectation is tried.
        best = min(scores[number] for number in tried) if tried else np.max(scores)
        improvement = expected_improvement(scores, self.objective.weight * deviation, float(best))
        improvement *= probability_informative(self.points, self.trials, self.objective)
        for number in {*chosen, *(number for number, _ in self.trials)}:
            improvement[number] = 0.0
        found = int(np.argmax(improvement))
        enough = _MIN_EXPECTED_IMPROVEMENT * self.objective.weight if self.ranking() else 0.0
        return (found, float(improvement[found])) if improvement[found] > enough else None

    def _times(self, chosen: Sequence[int]) -> tuple[Array, Array]:
        """Return mean and deviation of the logarithmic step time, with its share of compiling."""
        mean, deviation = self._posterior(chosen)
        if not (self._surrogate.is_modelled or self.ranking()):
            return mean, deviation  # relative times, to which no seconds can be added
        share, doubt = shares(self.points, self.trials)
        steady = np.exp(mean)
        whole = steady + share
        return np.log(whole), np.hypot(steady * deviation, share * doubt) / whole

    def _posterior(self, chosen: Sequence[int]) -> tuple[Array, Array]:
        """Return mean and deviation of the logarithmic step time without compiling."""
        seen, values, spread = self.ranking(), [], []
        for number in seen:
            steady = self._logarithms(number, steady=True)
            errors = [t.spread for n, t in self.trials if n == number and t.step_s is not None]
            values.append(statistics.median(steady))
            spread.append(max(statistics.median(errors), deviation(steady)))
        if chosen:
            mean, _ = self._surrogate.posterior(seen, values, spread)
            # Untried points are taken to have their expected time (kriging believer).
            believed = [number for number in chosen if number not in seen]
            seen, spread = seen + believed, spread + [NOISE] * len(believed)
            values = values + [float(mean[number]) for number in believed]
        return self._surrogate.posterior(seen, values, spread)

    def _score(self, number: int, log_step_s: float) -> float:
        point = self.points[number]
        peaks = [t.peak_bytes for n, t in self.trials if n == number and t.peak_bytes]
        peak = peaks[-1] if peaks else point.peak_bytes
        return self.objective.score(float(log_step_s), peak, point.devices)

    def _found(self, number: int) -> float:
        return self._score(number, statistics.median(self._logarithms(number)))

    def _logarithms(self, number: int, steady: bool = False) -> list[float]:
        """Return the logarithmic step time of each finished trial, `steady`: without compiling."""
        ended = [(t, t.step_s) for n, t in self.trials if n == number and t.step_s is not None]
        return [math.log(step_s - (t.compiling_s if steady else 0.0)) for t, step_s in ended]

    def _disagree(self, number: int) -> bool:
        """Return whether a point's trials differ so much that one of them was disturbed."""
        logarithms = self._logarithms(number)
        return len(logarithms) < MOST and deviation(logarithms) > MAX_REPEAT_STD


WARMUP_STEPS, MEASURED_STEPS = 5, 15
"""Steps of a trial. DeepSpeed's autotuner profiles 3 to 5. The error of 15 is recorded."""

SHORT = (
    f"train.steps={WARMUP_STEPS + MEASURED_STEPS}",
    "train.epochs=null",
    f"train.timing_warmup_steps={WARMUP_STEPS}",
    "train.eval_every=null",
    "train.checkpoint_every=null",
    "train.save_final=false",
    "schedule.warmup_steps=0",
)
"""Overrides that make a run a trial, without an effect on the cost of a step."""

OF_MEDIAN = math.sqrt(math.pi / 2)
"""Standard error of a median relative to a mean's (normal distribution, many values)."""


@dataclass(frozen=True)
class Measured:
    """Summary of a trial's record."""

    number: int
    """Index of the candidate."""
    repeat: int
    """Number of the candidate's trial, from 0."""
    trial: Trial
    outcome: str
    reason: str = ""
    """Why there is no step time, or why it is excluded."""
    steady_s: float | None = None
    """Seconds per optimizer step without compiling."""
    compile_s: float = 0.0
    loss: float | None = None
    """Loss after the trial in nats per target."""
    data_frac: float | None = None
    """Share of a step spent waiting for data."""
    shared: bool = False
    """True if another process used the device at the same time."""
    folder: str = ""


def trial_overrides(typed: Sequence[str], candidate: Sequence[str], repeat: int) -> tuple[str, ...]:
    """Return the overrides of a candidate's trial, given the user's overrides."""
    again = (f"repeat={repeat}",) if repeat else ()
    return (*drop_overrides(typed, (*candidate, *SHORT)), *candidate, *SHORT, *again)


def drop_overrides(typed: Sequence[str], changed: Sequence[str]) -> list[str]:
    """Return the user's overrides without replaced ones and those outside a configuration."""
    keys = (text.lstrip("+").partition("=")[0] for text in changed)
    gone = {*keys, "rerun", "repeat", "plan_only", "ignore_forecast"}
    kept = [text for text in typed if text.lstrip("+").partition("=")[0] not in gone]
    return [text for text in kept if text != "batch=auto"]


def measured(
    number: int,
    repeat: int,
    record: Record,
    folder: str,
    total_steps: float,
    on_gpu: bool,
    context_bytes: int = 0,
) -> Measured:
    """Return the result of a trial from its record.

    The cost of compiling is spread over `total_steps` of the run to be tuned. The peak on a GPU
    is the allocator's plus the driver's context, as in a forecast.
    """
    memory, peak = record.memory.measured, None
    if memory is not None:
        peak = memory.peak_reserved_bytes if on_gpu else memory.peak_allocated_bytes
        peak = None if peak is None else peak + context_bytes
    spread, compile_s = record.timing.steady_step_s, record.timing.compile_s or 0.0
    trial = Trial(None, peak_bytes=peak, ran_out=record.outcome == Outcome.oom.name)
    if record.outcome == Outcome.ok.name and spread is not None:
        # Percentiles are robust against single slow steps, which the deviation is not. Between
        # these two, a normal distribution has 2 * 1.2816 standard deviations.
        relative = (spread.p90 - spread.p10) / (2 * 1.2816) / spread.median
        error = OF_MEDIAN * relative / math.sqrt(spread.n)
        share = compile_s / total_steps
        trial = Trial(spread.median + share, error, share, peak)
    loss = record.loss
    return Measured(
        number,
        repeat,
        trial,
        record.outcome,
        record.failure.message if record.failure else "",
        spread.median if spread else None,
        compile_s,
        loss.train_final if loss.eval_final is None else loss.eval_final,
        record.timing.data_frac,
        bool(record.shared_device),
        folder,
    )


def is_higher(loss: float | None, typed: float | None) -> bool:
    """Return whether a loss exceeds the baseline's by more than rounding."""
    return loss is not None and typed is not None and loss > 1.01 * typed
