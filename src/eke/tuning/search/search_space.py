"""Search space: points, trials, objectives, and what is expected of points not tried yet.

The model is a Gaussian process over the logarithm of the step time. Its prior mean is the time
model's answer where there is one, else what is usual. Its error is a sum of independent parts: one
for all points alike (the machine), one for each value of each axis (a technique works better or
worse here than expected), a smooth one in the micro-batch, and one for each point alone (techniques
that do not simply multiply). Techniques that do multiply make few trials enough; Rasmussen and
Williams, Gaussian Processes for Machine Learning, 2006, chapter 2. Seconds of compiling are kept
separate, since techniques multiply the rest of a step and add this.

What disturbs a trial (another user's process, a page cache gone cold) is no normal error: one trial
in a few is off by any factor. So medians, here as for the steps within a trial.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, softmax

from eke.estimate.memory import Verdict

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """One configuration as the search sees it."""

    values: tuple[str, ...]
    """Its value on each axis, the same axes for all points."""
    micro_batch: int
    """Samples per device and forward pass."""
    devices: int = 1
    room: Verdict = Verdict.fits
    """Whether it fits into memory, by forecast; never unknown."""
    peak_bytes: int | None = None
    """Expected peak on one device; None if unknown."""
    expected_s: float | None = None
    """Seconds per optimizer step by the time model, without compiling; None if unknown."""
    usual: float = 1.0
    """Published step time relative to the baseline's; used where the time model has no answer."""
    compiling_s: float = 0.0
    """Expected seconds of compiling per optimizer step: once, over all of a run's steps."""
    needless_beside: tuple[tuple[str, ...], ...] = ()
    """Values of points that do the same with less work: where one of them has room with the same
    micro-batch, this one can only be slower."""


@dataclass(frozen=True)
class Trial:
    """Result of one point."""

    step_s: float | None
    """Seconds per optimizer step, the median after warm-up, with its share of compiling; None where
    it did not get there."""
    spread: float = 0.0
    """Standard error of the logarithm of `step_s`."""
    compiling_s: float = 0.0
    """Of `step_s`: its share of compiling."""
    peak_bytes: int | None = None
    """Measured; comparable with the points' own."""
    ran_out: bool = False
    """Of memory."""


SPEED_IN_MEMORY = 0.05
"""Weight of time relative to memory: a step twice as long has to save 3.5 % of the peak. Without it
the search would give any amount of time for the last megabyte."""


class Objective(Enum):
    """Quantity that the best configuration minimises."""

    speed = "speed"
    """Seconds per sample."""
    memory = "memory"
    """Peak memory of a device; among much the same, seconds per sample."""
    cost = "cost"
    """Device-seconds per sample."""

    def score(self, log_step_s: float, peak_bytes: float | None, devices: int) -> float:
        """The logarithm of what is minimised; `log_step_s` is of a step's seconds.

        All configurations have the same samples per step; the peak is needed for `memory` alone.
        """
        if self is Objective.memory:
            assert peak_bytes, "no search for memory without its forecast"
            return math.log(peak_bytes) + SPEED_IN_MEMORY * log_step_s
        if self is Objective.cost:
            return log_step_s + math.log(devices)
        return log_step_s

    @property
    def weight(self) -> float:
        """How much of an error of the logarithmic time is one of the score."""
        return SPEED_IN_MEMORY if self is Objective.memory else 1.0


MODELLED = (0.6, 0.12)
"""Standard deviations of the logarithm of the step time (0.1 is about 10 %) with the time model: of
all points alike, the machine's; of each value of an axis and of the micro-batch. Its published rows
are off by some 10 to 40 % (docs/how-to/forecast.md)."""

BLIND = (3.0, 0.2)
"""The same without: techniques move a step by factors of 0.5 to 2 (docs/reference/techniques.md),
and what is usual for them says less than half of that here."""

ALONE = 0.05
"""Standard deviation of a point by itself."""

REACH = 2.5
"""Doublings of the micro-batch over which its effect stays much the same."""

SCALES = (1.0, 1.5, 2.2, 3.3)
"""Factors on all doubts but the machine's, each counted as the trials make it likely: a time model
may be worse here than elsewhere, and who trusts a bad one too much stops too early."""

SCALE_DOUBT = 0.6
"""Standard deviation of the factor's logarithm before any trial: a few of them outvote it."""

NOISE = 0.015
"""Least standard deviation of a trial's logarithmic step time; the same run again differs so."""


class Surrogate:
    """A posterior over points, which have the same axes."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.is_modelled = any(point.expected_s for point in points)  # so its prior is in seconds
        self._machine, self._technique = MODELLED if self.is_modelled else BLIND
        self._prior: Array = np.log(prior_s(points))
        self._shapes = self._covariances(points, np.log2([p.micro_batch for p in points]))

    def posterior(
        self, seen: Sequence[int], log_step_s: Sequence[float], spread: Sequence[float]
    ) -> tuple[Array, Array]:
        """Mean and deviation of each logarithmic step time, given some and their errors."""
        machine = self._machine**2
        variance = np.diag(self._shapes)
        if not seen:
            return self._prior, np.sqrt(machine + variance)
        index = np.asarray(seen)
        noise = np.diag(np.square(np.maximum(spread, NOISE)))
        off = np.asarray(log_step_s) - self._prior[index]
        means, variances, likelihoods = [], [], []
        for scale in SCALES:
            among = machine + scale**2 * self._shapes[np.ix_(index, index)] + noise
            across = machine + scale**2 * self._shapes[:, index]
            gain = np.linalg.solve(among, across.T).T
            left = machine + scale**2 * variance - np.einsum("ij,ij->i", gain, across)
            means.append(self._prior + gain @ off)
            variances.append(np.maximum(left, 1e-12))
            likelihoods.append(likelihood(among, off, scale))
        weights = softmax(likelihoods)
        mean = weights @ np.array(means)
        between = weights @ np.square(np.array(means) - mean)
        return mean, np.sqrt(weights @ np.array(variances) + between)

    def _covariances(self, points: Sequence[Point], size: Array) -> Array:
        """Of everything but the machine, at a scale of 1."""
        doubt, total = self._technique**2, np.zeros((len(points), len(points)))
        for axis in range(len(points[0].values)):
            _, column = np.unique([point.values[axis] for point in points], return_inverse=True)
            total += doubt * (column[:, None] == column[None, :])
        distance = size[:, None] - size[None, :]
        total += doubt * np.exp(-0.5 * (distance / REACH) ** 2)
        return total + ALONE**2 * np.eye(len(points))


def prior_s(points: Sequence[Point]) -> list[float]:
    """Seconds per step before any trial, or what is in proportion to them.

    Where the time model says nothing of a point, the one of which it does and that has the most in
    common with it is used, times the usual factor of their differences.
    """
    known: dict[tuple[int, int], list[Point]] = {}
    for point in points:
        if point.expected_s:
            known.setdefault((point.devices, point.micro_batch), []).append(point)
    if not known:
        return [point.usual for point in points]
    return [point.expected_s or _stand_in_s(point, known) for point in points]


def _stand_in_s(point: Point, known: Mapping[tuple[int, int], Sequence[Point]]) -> float:
    def apart(cut: tuple[int, int]) -> float:
        return abs(math.log(cut[0] / point.devices)) + abs(math.log(cut[1] / point.micro_batch))

    def in_common(other: Point) -> int:
        return sum(a == b for a, b in zip(point.values, other.values, strict=True))

    nearest = max(known[min(known, key=apart)], key=in_common)
    assert nearest.expected_s is not None
    return nearest.expected_s * point.usual / nearest.usual


def likelihood(covariance: Array, off: Array, scale: float) -> float:
    """Logarithm of a scale's probability given what trials were off by, up to a constant."""
    _, log_size = np.linalg.slogdet(covariance)
    fit = off @ np.linalg.solve(covariance, off)
    return float(-0.5 * (fit + log_size) - 0.5 * (math.log(scale) / SCALE_DOUBT) ** 2)


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """By how much each point is expected to be below the best (Mockus 1975), 0 or more."""
    z = (best - mean) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    below = ndtr(z)
    improvement: Array = (best - mean) * below + deviation * density
    return improvement


RISK = 0.5
"""What the improvement of a tight configuration counts: it may run out of memory instead."""


def chances(
    points: Sequence[Point], trials: Sequence[tuple[int, Trial]], objective: Objective
) -> Array:
    """For each point, the chance that a trial of it tells something.

    Where memory is the objective, nothing that saves it is needless.
    """
    failed = {number for number, trial in trials if trial.step_s is None}
    ran_out = any(trial.ran_out for _, trial in trials)
    standing = {
        (point.values, point.micro_batch, point.devices)
        for number, point in enumerate(points)
        if point.room is Verdict.fits and number not in failed
    }
    suspects = _suspects(points, trials)

    def chance(point: Point) -> float:
        needless = objective is not Objective.memory and any(
            (values, point.micro_batch, point.devices) in standing
            for values in point.needless_beside
        )
        if needless or point.room is Verdict.does_not_fit:
            return 0.0
        if point.room is Verdict.tight and ran_out:
            return 0.0
        mine = set(enumerate(point.values))
        innocent = math.prod(1 - len(each & mine) / len(each) for each in suspects)
        return innocent if point.room is Verdict.fits else RISK * innocent

    return np.array([chance(point) for point in points])


def _suspects(
    points: Sequence[Point], trials: Sequence[tuple[int, Trial]]
) -> list[set[tuple[int, str]]]:
    """For each trial that failed, the values that worked nowhere: one of them is the reason.

    A failure without any is that of its combination, and of that alone.
    """
    values = [(set(enumerate(points[number].values)), trial) for number, trial in trials]
    worked = {each for own, trial in values if trial.step_s is not None for each in own}
    failures = [own for own, trial in values if trial.step_s is None and not trial.ran_out]
    return [own - worked for own in failures if own - worked]


UNSEEN, SEEN = 0.7, 0.4
"""Standard deviations of the logarithm of what compiling takes, before any trial that compiled and
after: a factor of two, and half as much again (an assumption; caches and cores differ)."""


def shares(points: Sequence[Point], trials: Sequence[tuple[int, Trial]]) -> tuple[Array, Array]:
    """Seconds per step that compiling adds to each point, and the deviation of their logarithm.

    What the estimates of tried points were off by, those of the others are taken to be off by, too.
    """
    ended = [(number, trial) for number, trial in trials if trial.step_s is not None]
    off = [
        math.log(trial.compiling_s / points[number].compiling_s)
        for number, trial in ended
        if trial.compiling_s and points[number].compiling_s
    ]
    factor = math.exp(sum(off) / len(off)) if off else 1.0
    expected: Array = factor * np.array([point.compiling_s for point in points])
    doubt = np.full(len(points), SEEN if off else UNSEEN)
    for number in {number for number, _ in ended}:
        own = [trial.compiling_s for n, trial in ended if n == number]
        expected[number], doubt[number] = sum(own) / len(own), 0.0
    return expected, doubt


UNSTEADY = 0.1
"""Standard deviation between trials of one configuration from which on one of them must have been
disturbed: of two, one took about 15 % longer."""

MOST = 4
"""Trials of one configuration at most: on a machine that is never quiet, more tell no more."""

OF_MAD = 1.4826
"""A normal distribution's standard deviation over the median distance from its median."""

OF_FEW = {3: 1.495, 4: 1.363}
"""Correction of that for few values (Croux and Rousseeuw 1992, "Time-efficient algorithms for two
highly robust estimators of scale"; by simulation the same to 1 %)."""


def deviation(logarithms: Sequence[float]) -> float:
    """Standard deviation from trial to trial; of three or more, one that is far off hardly counts.

    0 for a single trial, which gives no estimate.
    """
    if len(logarithms) < 3:
        return statistics.stdev(logarithms) if len(logarithms) == 2 else 0.0
    middle = statistics.median(logarithms)
    distance = statistics.median(abs(each - middle) for each in logarithms)
    return OF_MAD * OF_FEW.get(len(logarithms), 1.0) * distance


def deviation_between(groups: Sequence[Sequence[float]]) -> float:
    """The same, pooled over configurations; 0 where none was tried twice."""
    repeated = [group for group in groups if len(group) > 1]
    if not repeated:
        return 0.0
    squares = sum(deviation(group) ** 2 * (len(group) - 1) for group in repeated)
    return float((squares / sum(len(group) - 1 for group in repeated)) ** 0.5)
