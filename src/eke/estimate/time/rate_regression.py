"""Regression of measured times on kinds of work, and the bias and spread of predictions.

Of all sets of kinds that leave no rate negative, the one is taken that predicts each run best from
the others (leave-one-out; Allen 1974, The relationship between variable selection and data
augmentation, Technometrics 16). Errors are relative: a short step counts as much as a long one.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95

LEVERAGE = 0.99
"""A run that no other resembles cannot be held out."""


@dataclass(frozen=True)
class Solution:
    """The best set."""

    chosen: tuple[int, ...]
    """Columns of the table."""
    rates: tuple[float, ...]
    """Seconds for one unit of each."""
    left_out: tuple[float, ...]
    """Predicted over measured of each run, by all others."""


def solve(table: Sequence[Sequence[float]], measured: Sequence[float]) -> Solution | None:
    """The set of columns that predicts best; None where none explains the times.

    Args:
        table: amounts of work, a row per run and a column per kind.
        measured: seconds of each run.
    """
    relative = np.array(table) / np.array(measured)[:, None]
    best: Solution | None = None
    least = np.inf
    for count in range(1, relative.shape[1] + 1):
        for chosen in combinations(range(relative.shape[1]), count):
            found = _solved(relative[:, chosen])
            if found is None:
                continue
            rates, left_out = found
            error = float(np.sqrt(np.mean(np.log(left_out) ** 2)))
            if error < least:
                least = error
                best = Solution(chosen, tuple(rates.tolist()), tuple(left_out.tolist()))
    return best


def _solved(relative: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Rates by least squares, and predicted over measured of each run by all others.

    None where a rate is not positive, or a run decides one alone.
    """
    scale = relative.max(axis=0)
    if not np.all(scale > 0) or len(relative) <= relative.shape[1]:
        return None
    scaled = relative / scale
    inverse = np.linalg.pinv(scaled)
    rates = inverse.sum(axis=1)
    if np.any(rates <= 0):
        return None
    leverage = np.einsum("ij,ji->i", scaled, inverse)
    if np.any(leverage > LEVERAGE):
        return None
    residual = 1 - scaled @ rates
    left_out = 1 - residual / (1 - leverage)
    return (rates / scale, left_out) if np.all(left_out > 0) else None


@dataclass(frozen=True)
class Correction:
    """Correction of the next run's prediction by the errors of finished ones."""

    factor: float
    """Measured over predicted, as it is to be expected; 1 where no bias is seen."""
    within: float
    """Half the width of the interval, as a natural logarithm: about a relative error."""


def correction_of(ratios: Sequence[float]) -> Correction:
    """The bias of predictions, where it differs from zero by more than chance, and their spread.

    The interval is Student's for one more observation: t(n - 1) * s * sqrt(1 + 1/n), with s about
    the centre that is used (Hahn & Meeker 1991, Statistical Intervals, section 4.7). Errors of
    forecasts have heavier tails than the normal distribution, so it is never narrower than the
    largest deviation that was seen.

    Args:
        ratios: measured over predicted of each configuration, at least five.
    """
    logs = [math.log(ratio) for ratio in ratios]
    count, centre = len(logs), statistics.median(logs)
    low, high = median_interval(logs)
    if low <= 0 <= high:  # chance would do
        centre = 0.0
    deviations = [each - centre for each in logs]
    spread = math.sqrt(sum(d * d for d in deviations) / (count - 1))
    quantile = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
    student = quantile * spread * math.sqrt(1 + 1 / count)
    return Correction(math.exp(centre), max(student, *(abs(d) for d in deviations)))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Order statistics between which the median lies with about `CONFIDENCE`, whatever the shape.

    Signs about the true median are fair coins (Conover 1999, Practical Nonparametric Statistics,
    section 3.2). Of five values all of them: 94 %.
    """
    ordered = sorted(values)
    count, tail, cut = len(ordered), 0.0, 0
    while True:
        tail += math.comb(count, cut) / 2**count
        if tail > (1 - CONFIDENCE) / 2:
            break
        cut += 1
    cut = max(1, cut)
    return ordered[cut - 1], ordered[count - cut]
