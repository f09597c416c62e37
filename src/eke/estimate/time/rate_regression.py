"""Regression of measured times on kinds of work: the cost of one unit of each.

Of all sets of kinds that leave no rate negative, the one is taken that predicts each run best from
the others (leave-one-out; Allen 1974, The relationship between variable selection and data
augmentation, Technometrics 16). Errors are relative: a short step counts as much as a long one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

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
