"""Search space: points, trials, objectives, and the expected results of untried points.

The model is a Gaussian process over the logarithm of the step time (Rasmussen and Williams,
Gaussian Processes for Machine Learning, 2006, chapter 2). Its prior mean is the time model's
estimate if there is one, else the usual time. Its error is a sum of independent parts: one for all
points (the machine), one for each value of each axis, a smooth one in the micro-batch, and one for
each point (techniques whose effects do not multiply). Compiling adds seconds and is modelled
separately.

Disturbances (another process, a cold page cache) make some trials off by any factor. Therefore
medians are used.
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
    """One configuration in the search."""

    values: tuple[str, ...]
    """Value on each axis. All points have the same axes."""
    micro_batch: int
    """Samples per device and forward pass."""
    devices: int = 1
    verdict: Verdict = Verdict.fits
    """Memory verdict of the forecast, never unknown."""
    peak_bytes: int | None = None
    """Expected peak bytes on one device. None if unknown."""
    expected_s: float | None = None
    """Seconds per optimizer step without compiling, by the time model. None if unknown."""
    usual: float = 1.0
    """Published step time relative to the baseline's, used without the time model."""
    compiling_s: float = 0.0
    """Expected seconds of compiling per optimizer step, spread over all of a run's steps."""
    needless_beside: tuple[tuple[str, ...], ...] = ()
    """Values of points that compute the same faster, if they fit with the same micro-batch."""


@dataclass(frozen=True)
class Trial:
    """Result of one trial of a point."""

    step_s: float | None
    """Median seconds per optimizer step with its share of compiling. None if not measured."""
    spread: float = 0.0
    """Standard error of the logarithm of `step_s`."""
    compiling_s: float = 0.0
    """Share of compiling in `step_s`."""
    peak_bytes: int | None = None
    """Measured peak, comparable with the points' expected peak."""
    ran_out: bool = False


_SPEED_IN_MEMORY = 0.05
"""Weight of time relative to memory: a step twice as long must save 3.5 % of the peak."""


class Objective(Enum):
    """Quantity to be minimized."""

    speed = "speed"
    """Seconds per sample."""
    memory = "memory"
    """Peak memory of a device. Seconds per sample decide between similar peaks."""
    cost = "cost"
    """Device-seconds per sample."""

    def score(self, log_step_s: float, peak_bytes: float | None, devices: int) -> float:
        """Return the logarithm of the quantity to be minimized. Only `memory` uses the peak."""
        if self is Objective.memory:
            assert peak_bytes, "no search for memory without its forecast"
            return math.log(peak_bytes) + _SPEED_IN_MEMORY * log_step_s
        if self is Objective.cost:
            return log_step_s + math.log(devices)
        return log_step_s

    @property
    def weight(self) -> float:
        """Error of the score per error of the logarithmic time."""
        return _SPEED_IN_MEMORY if self is Objective.memory else 1.0


_MODELLED = (0.6, 0.12)
"""Standard deviations of the logarithmic step time (0.1 is about 10 %) with the time model: of all
points together, and of each value of an axis and of the micro-batch. Estimates for published rows
are off by some 10 to 40 % (docs/how-to/forecast.md)."""

_BLIND = (3.0, 0.2)
"""The same without the time model. Techniques change a step by factors of 0.5 to 2
(docs/reference/techniques.md), and usual factors explain less than half of it."""

_ALONE = 0.05
"""Standard deviation of the logarithmic step time of each single point."""

_REACH = 2.5
"""Doublings of the micro-batch over which its effect is similar."""

_SCALES = (1.0, 1.5, 2.2, 3.3)
"""Factors on all deviations except the machine's, weighted by their likelihood. The time model may
be worse here than elsewhere, and too much trust in it stops a search too early."""

_SCALE_DOUBT = 0.6
"""Standard deviation of the factor's logarithm before any trial. A few trials outweigh it."""

NOISE = 0.015
"""Least standard deviation of a trial's logarithmic step time, as in identical runs."""


class Surrogate:
    """Posterior over points with the same axes."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.is_modelled = any(point.expected_s for point in points)  # the prior is in seconds
        self._machine, self._technique = _MODELLED if self.is_modelled else _BLIND
        self._prior: Array = np.log(prior_s(points))
        self._shapes = self._covariances(points, np.log2([p.micro_batch for p in points]))

    def posterior(
        self, seen: Sequence[int], log_step_s: Sequence[float], spread: Sequence[float]
    ) -> tuple[Array, Array]:
        """Return mean and deviation of each logarithmic step time, given some with their errors."""
        machine = self._machine**2
        variance = np.diag(self._shapes)
        if not seen:
            return self._prior, np.sqrt(machine + variance)
        index = np.asarray(seen)
        noise = np.diag(np.square(np.maximum(spread, NOISE)))
        off = np.asarray(log_step_s) - self._prior[index]
        means, variances, likelihoods = [], [], []
        for scale in _SCALES:
            among = machine + scale**2 * self._shapes[np.ix_(index, index)] + noise
            across = machine + scale**2 * self._shapes[:, index]
            gain = np.linalg.solve(among, across.T).T
            left = machine + scale**2 * variance - np.einsum("ij,ij->i", gain, across)
            means.append(self._prior + gain @ off)
            variances.append(np.maximum(left, 1e-12))
            likelihoods.append(_likelihood(among, off, scale))
        weights = softmax(likelihoods)
        mean = weights @ np.array(means)
        between = weights @ np.square(np.array(means) - mean)
        return mean, np.sqrt(weights @ np.array(variances) + between)

    def _covariances(self, points: Sequence[Point], size: Array) -> Array:
        """Return the covariance of all parts except the machine, for a scale of 1."""
        doubt, total = self._technique**2, np.zeros((len(points), len(points)))
        for axis in range(len(points[0].values)):
            _, column = np.unique([point.values[axis] for point in points], return_inverse=True)
            total += doubt * (column[:, None] == column[None, :])
        distance = size[:, None] - size[None, :]
        total += doubt * np.exp(-0.5 * (distance / _REACH) ** 2)
        return total + _ALONE**2 * np.eye(len(points))


def prior_s(points: Sequence[Point]) -> list[float]:
    """Return the seconds per step before any trial, or relative times without the time model."""
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


def _likelihood(covariance: Array, off: Array, scale: float) -> float:
    """Return a scale's log-likelihood given the trials' deviations, up to a constant."""
    _, log_size = np.linalg.slogdet(covariance)
    fit = off @ np.linalg.solve(covariance, off)
    return float(-0.5 * (fit + log_size) - 0.5 * (math.log(scale) / _SCALE_DOUBT) ** 2)


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """Return how far each point is expected to be below the best (Mockus 1975), at least 0."""
    z = (best - mean) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    improvement: Array = (best - mean) * ndtr(z) + deviation * density
    return improvement


def probability_informative(
    points: Sequence[Point], trials: Sequence[tuple[int, Trial]], objective: Objective
) -> Array:
    """Return each point's chance of an informative trial, 0 if a faster equivalent fits."""
    failed = {number for number, trial in trials if trial.step_s is None}
    ran_out = any(trial.ran_out for _, trial in trials)
    standing = {
        (point.values, point.micro_batch, point.devices)
        for number, point in enumerate(points)
        if point.verdict is Verdict.fits and number not in failed
    }
    suspects = _possible_causes(points, trials)

    def chance(point: Point) -> float:
        needless = objective is not Objective.memory and any(
            (values, point.micro_batch, point.devices) in standing
            for values in point.needless_beside
        )
        # A tight configuration may run out of memory.
        tight = 0.0 if ran_out else 0.5
        weight = {Verdict.fits: 1.0, Verdict.tight: tight}.get(point.verdict, 0.0)
        mine = set(enumerate(point.values))
        innocent = (1 - len(each & mine) / len(each) for each in suspects)
        return 0.0 if needless else weight * math.prod(innocent)

    return np.array([chance(point) for point in points])


def _possible_causes(
    points: Sequence[Point], trials: Sequence[tuple[int, Trial]]
) -> list[set[tuple[int, str]]]:
    """Return, per failed trial, its values that worked in no trial: one of them is the cause."""
    values = [(set(enumerate(points[number].values)), trial) for number, trial in trials]
    worked = {each for own, trial in values if trial.step_s is not None for each in own}
    failures = [own for own, trial in values if trial.step_s is None and not trial.ran_out]
    return [own - worked for own in failures if own - worked]


UNSEEN, SEEN = 0.7, 0.4
"""Standard deviations of the logarithmic compile time before and after any trial that compiled: a
factor of two, and half as much again (an assumption, since caches and cores differ)."""


def shares(points: Sequence[Point], trials: Sequence[tuple[int, Trial]]) -> tuple[Array, Array]:
    """Return the compile seconds per step, corrected by trials, and their log deviation."""
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


MAX_REPEAT_STD = 0.1
"""Standard deviation between trials of one configuration above which one of them must have been
disturbed. For two trials, one took about 15 % longer."""

MOST = 4
"""Most trials of one configuration, since more do not help on a busy machine."""

_MAD_TO_STD = 1.4826
"""Standard deviation of a normal distribution relative to the median distance from its median."""

_MAD_SMALL_SAMPLE_FACTORS = {3: 1.495, 4: 1.363}
"""Correction of OF_MAD for few values (Croux and Rousseeuw 1992, "Time-efficient algorithms for two
highly robust estimators of scale"). Simulations agree to 1 %."""


def deviation(logarithms: Sequence[float]) -> float:
    """Return the standard deviation between trials, robust from three trials on, 0 for one."""
    if len(logarithms) < 3:
        return statistics.stdev(logarithms) if len(logarithms) == 2 else 0.0
    middle = statistics.median(logarithms)
    distance = statistics.median(abs(each - middle) for each in logarithms)
    return _MAD_TO_STD * _MAD_SMALL_SAMPLE_FACTORS.get(len(logarithms), 1.0) * distance


def deviation_between(groups: Sequence[Sequence[float]]) -> float:
    """Return the deviation pooled over configurations, 0 if none was tried twice."""
    repeated = [group for group in groups if len(group) > 1]
    if not repeated:
        return 0.0
    squares = sum(deviation(group) ** 2 * (len(group) - 1) for group in repeated)
    return float((squares / sum(len(group) - 1 for group in repeated)) ** 0.5)
