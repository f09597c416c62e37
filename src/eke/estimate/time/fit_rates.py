"""Rates of a device from finished runs: seconds per FLOP, per byte and per launch.

How far off one more run may be is what the predictions of runs left out were off by
(`eke.estimate.time.rate_regression`, `eke.estimate.memory.calibration.fit`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from eke.estimate.memory.calibration import Fit, Pair, fit
from eke.estimate.time.time_history import Observation

NEEDED = 5
"""Configurations of a group before anything is said, as for memory."""

MOST = 60
"""Newest configurations that are looked at."""


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
    # Here, and not above: it imports numpy, which a plan without runs does without.
    from eke.estimate.time.rate_regression import solve

    kinds = sorted({kind for amounts, _ in newest for kind, amount in amounts if amount > 0})
    measured = [seconds for _, seconds in newest]
    table = [[dict(amounts).get(kind, 0.0) for kind in kinds] for amounts, _ in newest]
    best = solve(table, measured)
    interval = _interval(best.left_out) if best else None
    if best is None or interval is None:
        return None
    return FittedRates(
        seconds={kinds[n]: rate for n, rate in zip(best.chosen, best.rates, strict=True)},
        seen=tuple(kinds),
        largest=max(measured),
        smallest=min(measured),
        num_runs=len(newest),
        factor=interval.factor,
        within=interval.within,
    )


NANO = 10**9
"""`Pair` holds whole numbers: a ratio with nine digits."""


def _interval(left_out: Sequence[float]) -> Fit | None:
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
