"""Rates of a device from finished runs: seconds per FLOP, per byte and per launch.

Of all sets of these kinds of work that leave no rate negative, the one is taken that predicts each
run best from the others (leave-one-out; Allen 1974, The relationship between variable selection and
data augmentation, Technometrics 16). Errors are relative: a short step counts as much as a long
one. How far off one more run may be is what those predictions were off by
(`eke.forecast.calibration.fit`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from eke.forecast.calibration import Fit, Pair, fit
from eke.pace.observed import Observation

NEEDED = 5
"""Configurations of a group before anything is said, as for memory."""

MOST = 60
"""Newest configurations that are looked at."""

LEVERAGE = 0.99
"""A run that no other speaks for cannot be left out."""


@dataclass(frozen=True)
class FittedRates:
    """Of one device, as far as finished runs tell."""

    seconds: dict[str, float]
    """Kind of work -> seconds for one unit of it; kinds that make no difference are 0."""
    seen: tuple[str, ...]
    """Kinds of work that the runs did at all."""
    largest: float
    """Seconds of the longest step seen."""
    smallest: float
    num_runs: int
    factor: float
    within: float
    """Half the width of the interval, as a natural logarithm."""


@lru_cache(maxsize=16)
def fitted_rates(
    observations: tuple[tuple[tuple[tuple[str, float], ...], float], ...],
) -> FittedRates | None:
    """Rates; None where there are too few runs, or none explains them.

    Args:
        observations: amounts of work and measured seconds of each.
    """
    newest = observations[-MOST:]
    if len(newest) < NEEDED:
        return None
    kinds = sorted({kind for amounts, _ in newest for kind, amount in amounts if amount > 0})
    measured = np.array([seconds for _, seconds in newest])
    table = np.array([[dict(amounts).get(kind, 0.0) for kind in kinds] for amounts, _ in newest])
    relative = table / measured[:, None]
    best: tuple[float, tuple[int, ...], np.ndarray, np.ndarray] | None = None
    for count in range(1, len(kinds) + 1):
        for chosen in combinations(range(len(kinds)), count):
            found = _solved(relative[:, chosen])
            if found is None:
                continue
            rates, left_out = found
            error = float(np.sqrt(np.mean(np.log(left_out) ** 2)))
            if best is None or error < best[0]:
                best = error, chosen, rates, left_out
    if best is None:
        return None
    _, chosen, rates, left_out = best
    interval = _interval(left_out)
    if interval is None:
        return None
    return FittedRates(
        seconds={kinds[n]: float(rate) for n, rate in zip(chosen, rates, strict=True)},
        seen=tuple(kinds),
        largest=float(measured.max()),
        smallest=float(measured.min()),
        num_runs=len(newest),
        factor=interval.factor,
        within=interval.within,
    )


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


NANO = 10**9
"""`Pair` holds whole numbers: a ratio with nine digits."""


def _interval(left_out: np.ndarray) -> Fit | None:
    """Bias and spread of predictions that did not know the run."""
    pairs = [
        Pair(f"run {n}", f"run {n}", max(1, round(NANO * ratio)), NANO)
        for n, ratio in enumerate(left_out)
    ]
    return fit(pairs)


def as_table(
    observations: Sequence[Observation],
) -> tuple[tuple[tuple[tuple[str, float], ...], float], ...]:
    """Observations as what `fitted_rates` remembers its answers by."""
    return tuple((tuple(sorted(each.amounts.items())), each.measured) for each in observations)


def correction(observations: Sequence[Observation]) -> Fit | None:
    """What finished runs say of predictions by datasheets; None where there are too few."""
    pairs = [
        Pair(each.key, each.run_id, max(1, round(NANO * each.predicted)),
             max(1, round(NANO * each.measured)))
        for each in observations if each.predicted > 0
    ]  # fmt: skip
    return fit(pairs)
