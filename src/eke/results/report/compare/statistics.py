"""Intervals over repeats, and when a difference may be claimed.

Rates and bytes are compared on a logarithmic scale, so that a ratio and its inverse have one
answer. A ratio's interval is Student's t over the differences of logarithms of runs that belong
together (the same repeat and seed, which a sweep measures close to each other, so that drift of the
machine cancels), or Welch's where too few belong together
(https://en.wikipedia.org/wiki/Welch%27s_t-test). Intervals hold 95 % each by itself; what is
claimed of several comparisons with one baseline is corrected for their number by Holm's method
(https://en.wikipedia.org/wiki/Holm%E2%80%93Bonferroni_method).
tests/unit/results/report/test_power.py simulates how often equal things are called different, and
how often a planted difference is found.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from statistics import fmean

LEVEL = 0.95
"""Share of intervals that hold the true value."""

MIN_REPEATS = 3
"""Below it there is no interval and no claim: with two, Student's t is 12.7 standard errors."""

SAME = 0.02
"""An interval that lies within this of 1 says that two things are the same, for any use."""


class Decision(Enum):
    """What may be said of a ratio."""

    higher = "higher"
    lower = "lower"
    same = "same"
    """Within SAME, whole interval."""
    hint = "hint"
    """The interval leaves out 1, but not after the correction for the number of comparisons."""
    unresolved = "not resolved"
    single = "too few repeats"


@dataclass(frozen=True)
class Estimate:
    """A quantity over repeats: the geometric mean, and its interval where there are enough."""

    value: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Ratio:
    """One configuration's quantity over the baseline's."""

    value: float
    low: float | None
    high: float | None
    n: int
    """Runs, or pairs of runs, of the smaller side."""
    decision: Decision
    p: float | None = None
    """Of equality, before any correction."""


Sample = Mapping[Hashable, float]
"""Which repeat -> what was measured; positive."""


def estimate(sample: Sample) -> Estimate | None:
    """Geometric mean with its interval; None of nothing."""
    logs = [math.log(value) for value in sample.values()]
    if not logs:
        return None
    if len(logs) < MIN_REPEATS:
        return Estimate(math.exp(fmean(logs)), None, None, len(logs))
    mean, error, freedom = fmean(logs), math.sqrt(variance(logs) / len(logs)), len(logs) - 1
    half = quantile(freedom) * error
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def ratio(base: Sample, other: Sample) -> Ratio | None:
    """`other` over `base` with its interval; None if one of them is empty.

    The decision is the one of a single comparison; see `correct`.
    """
    if not base or not other:
        return None
    shared = [key for key in base if key in other]
    if len(shared) >= MIN_REPEATS:
        logs = [math.log(other[key] / base[key]) for key in shared]
        return of_logs(logs)
    if shared and min(len(base), len(other)) < MIN_REPEATS:  # no drift between other repeats
        base, other = ({key: each[key] for key in shared} for each in (base, other))
    first, second = ([math.log(v) for v in sample.values()] for sample in (base, other))
    mean, n = fmean(second) - fmean(first), min(len(first), len(second))
    if n < MIN_REPEATS:
        return Ratio(math.exp(mean), None, None, n, Decision.single)
    error, freedom = _welch(first, second)
    return _by_t(mean, error, freedom, n)


def of_logs(logs: Sequence[float]) -> Ratio:
    """The ratio that some logarithms of ratios are samples of."""
    mean, n = fmean(logs), len(logs)
    if n < MIN_REPEATS:
        return Ratio(math.exp(mean), None, None, n, Decision.single)
    return _by_t(mean, math.sqrt(variance(logs) / n), n - 1, n)


def correct(ratios: Mapping[Hashable, Ratio]) -> dict[Hashable, Ratio]:
    """Decisions of several comparisons with one baseline, by Holm's method."""
    tested = sorted(
        (key for key, each in ratios.items() if each.p is not None),
        key=lambda key: ratios[key].p or 0.0,
    )
    decided, holds = dict(ratios), True
    for rank, key in enumerate(tested):
        each = ratios[key]
        holds = holds and (each.p or 0.0) <= (1 - LEVEL) / (len(tested) - rank)
        if not holds and each.decision in (Decision.higher, Decision.lower):
            decided[key] = replace(each, decision=Decision.hint)
    return decided


def variance(values: Sequence[float]) -> float:
    """Unbiased; in plain floats, a tenth of the time of the standard library's exact one."""
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


@cache
def quantile(freedom: float) -> float:
    """Standard errors to either side of a mean, for LEVEL."""
    from scipy.special import stdtrit  # here: 0.1 s that `eke --help` does without

    return float(stdtrit(freedom, 0.5 + LEVEL / 2))


def ratio_of(mean: float, half: float, p: float, n: int) -> Ratio:
    """The ratio of a mean of logarithms with half of its interval."""
    low, high = math.exp(mean - half), math.exp(mean + half)
    return Ratio(math.exp(mean), low, high, n, _decision(low, high), p)


def _by_t(mean: float, error: float, freedom: float, n: int) -> Ratio:
    """The ratio of a mean of logarithms with its standard error and degrees of freedom."""
    return ratio_of(mean, quantile(freedom) * error, _p(mean, error, freedom), n)


def _decision(low: float, high: float) -> Decision:
    if low >= 1 - SAME and high <= 1 + SAME:
        return Decision.same
    if low > 1:
        return Decision.higher
    return Decision.lower if high < 1 else Decision.unresolved


def _p(mean: float, error: float, freedom: float) -> float:
    from scipy.special import stdtr

    if error == 0.0:
        return 1.0 if mean == 0.0 else 0.0
    return float(2 * stdtr(freedom, -abs(mean) / error))


def _welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Standard error of the difference of two means, and Welch-Satterthwaite's freedom."""
    parts = [variance(each) / len(each) for each in (first, second)]
    total = sum(parts)
    if total == 0.0:
        return 0.0, min(len(first), len(second)) - 1
    weights = [part**2 / (len(each) - 1) for part, each in zip(parts, (first, second), strict=True)]
    return math.sqrt(total), total**2 / sum(weights)
