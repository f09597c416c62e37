"""What a few trials say of all points: a Gaussian process over the logarithm of the step time.

The prior mean is the time model's answer where there is one, else what is usual. Its error is a sum
of independent parts: one for all points alike (the machine), one for each value of each axis (a
technique works better or worse here than expected), a smooth one in the micro-batch, and one for
each point alone (techniques that do not simply multiply). Techniques that do multiply make few
trials enough; Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, chapter 2.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, softmax

from eke.tuning.search.search_space import Point

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Doubt:
    """Standard deviations of the logarithm of the step time: 0.1 is about 10 %."""

    machine: float
    """Of all points alike."""
    technique: float
    """Of a value of an axis."""
    batch: float
    """Of the micro-batch's effect."""
    alone: float
    """Of a point by itself."""
    reach: float
    """Doublings of the micro-batch over which its effect stays much the same."""


MODELLED = Doubt(machine=0.6, technique=0.12, batch=0.12, alone=0.05, reach=2.5)
"""With the time model: its published rows are off by some 10 to 40 % (docs/forecast.md)."""

BLIND = Doubt(machine=3.0, technique=0.2, batch=0.2, alone=0.05, reach=2.5)
"""Without: techniques move a step by factors of 0.5 to 2 (docs/techniques.md), and what is usual
for them says less than half of that here."""

SCALES = (1.0, 1.5, 2.2, 3.3)
"""Factors on all doubts but the machine's, each counted as the trials make it likely: a time model
may be worse here than elsewhere, and who trusts a bad one too much stops too early."""

SCALE_DOUBT = 0.6
"""Standard deviation of the factor's logarithm before any trial: a few of them outvote it."""

NOISE = 0.015
"""Least standard deviation of a trial's logarithmic step time; the same run again differs so."""


class Surrogate:
    """A posterior over points.

    Args:
        points: all there are, the same axes each.
    """

    is_modelled: bool
    """Whether its prior is in seconds."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.is_modelled = any(point.expected_s for point in points)
        self.doubt = MODELLED if self.is_modelled else BLIND
        self._prior: Array = np.log(prior_s(points))
        self._shapes = self._covariances(points, np.log2([p.micro_batch for p in points]))

    def posterior(
        self, seen: Sequence[int], log_step_s: Sequence[float], spread: Sequence[float]
    ) -> tuple[Array, Array]:
        """Mean and standard deviation of the logarithmic step time of each point.

        Args:
            seen: numbers of the points that were tried, each once.
            log_step_s: what was found.
            spread: its standard error.
        """
        machine = self.doubt.machine**2
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
        doubt, count = self.doubt, len(points)
        total = np.zeros((count, count))
        for axis in range(len(points[0].values)):
            codes = {value: n for n, value in enumerate({point.values[axis] for point in points})}
            column = np.array([codes[point.values[axis]] for point in points])
            total += doubt.technique**2 * (column[:, None] == column[None, :])
        distance = size[:, None] - size[None, :]
        total += doubt.batch**2 * np.exp(-0.5 * (distance / doubt.reach) ** 2)
        total += doubt.alone**2 * np.eye(count)
        return total


def prior_s(points: Sequence[Point]) -> list[float]:
    """Seconds per step before any trial, or what is in proportion to them.

    Where the time model says nothing of a point, the one of which it does and that has the most in
    common with it stands in, times what is usual for what they differ in.
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
