"""Regression of measured times on kinds of work, and the bias and spread of predictions.

The set of kinds with positive rates and the lowest leave-one-out error is used (Allen 1974, The
relationship between variable selection and data augmentation, Technometrics 16). Errors are
relative, so short and long steps have equal weight.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.special import bdtr, stdtrit

_CONFIDENCE = 0.95

_LEVERAGE = 0.99
"""Largest leverage of a run. A run unlike all others cannot be left out."""


class _Solution(NamedTuple):
    """Rates for one set of columns."""

    error: float
    """Root mean square of the logarithms of `left_out`."""
    seconds: dict[int, float]
    """Seconds per unit by column of the table."""
    left_out: list[float]
    """Predicted over measured time of each run, by the other runs."""


def solve(table: Sequence[Sequence[float]], measured: Sequence[float]) -> _Solution | None:
    """Return the kinds of work (columns of the table) that predict best, None if none do."""
    relative = np.array(table) / np.array(measured)[:, None]
    return min(_solutions(relative), key=lambda found: found.error, default=None)


def _solutions(relative: np.ndarray) -> Iterator[_Solution]:
    """Yield the least-squares solution of each set, if rates are positive and no run decides."""
    num_columns = relative.shape[1]
    for count in range(1, min(num_columns, len(relative) - 1) + 1):
        for chosen in combinations(range(num_columns), count):
            columns = relative[:, chosen]
            scale = columns.max(axis=0)
            if not np.all(scale > 0):
                continue
            scaled = columns / scale
            inverse = np.linalg.pinv(scaled)
            rates, leverage = inverse.sum(axis=1), np.einsum("ij,ji->i", scaled, inverse)
            if np.any(rates <= 0) or np.any(leverage > _LEVERAGE):
                continue
            left_out = 1 - (1 - scaled @ rates) / (1 - leverage)
            if np.all(left_out > 0):
                error = float(np.sqrt(np.mean(np.log(left_out) ** 2)))
                seconds = dict(zip(chosen, (rates / scale).tolist(), strict=True))
                yield _Solution(error, seconds, left_out.tolist())


@dataclass(frozen=True)
class Correction:
    """Correction of a prediction by the errors of finished runs."""

    factor: float
    """Expected ratio of measured to predicted time. 1 without a significant bias."""
    within: float
    """Half the width of the interval as a natural logarithm, about a relative error."""


def correction_of(ratios: Sequence[float]) -> Correction:
    """Return the bias of predictions, if significant, and their spread.

    The interval is Student's for one more observation: t(n - 1) * s * sqrt(1 + 1/n), with s about
    the centre in use (Hahn & Meeker 1991, Statistical Intervals, section 4.7). Forecast errors have
    heavier tails than the normal distribution, so the interval also covers the largest deviation.
    `ratios`: measured over predicted, at least five.
    """
    logs = [math.log(ratio) for ratio in ratios]
    count, centre = len(logs), statistics.median(logs)
    low, high = median_interval(logs)
    if low <= 0 <= high:  # not significant
        centre = 0.0
    deviations = [each - centre for each in logs]
    spread = math.sqrt(sum(d * d for d in deviations) / (count - 1))
    quantile = float(stdtrit(count - 1, (1 + _CONFIDENCE) / 2))
    student = quantile * spread * math.sqrt(1 + 1 / count)
    return Correction(math.exp(centre), max(student, *(abs(d) for d in deviations)))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return order statistics that enclose the median with about `_CONFIDENCE`.

    By the sign test (Conover 1999, Practical Nonparametric Statistics, section 3.2).
    """
    ordered, count = sorted(values), len(values)
    tail = (1 - _CONFIDENCE) / 2
    cut = next(rank for rank in range(1, count + 1) if bdtr(rank, count, 0.5) > tail)
    return ordered[cut - 1], ordered[count - cut]
