"""The noise of each configuration, estimated with that of the others on the same machine.

Three repeats leave two degrees of freedom to a configuration alone: too few to find a difference
of 10 % among twelve. What all configurations of a repeat share is removed first, then each
variance is moderated towards the others' by an inverse gamma prior that is fitted to them
(Smyth 2004, https://doi.org/10.2202/1544-6115.1027). A configuration that is noisier than chance
allows keeps its own variance and is left out of the prior, as in Phipson et al. 2016
(https://doi.org/10.1214/16-AOAS920). benchmarks/report_power.py measures the errors and the power.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from eke.report.compare.statistics import LEVEL, MIN_REPEATS, Ratio, Sample, decide, ratio, variance

MIN_ROWS = 4
"""With fewer there is nothing to fit a prior to: each comparison stands by itself."""

MIN_PRIOR = 6
"""Up to here a noisy row stays in the prior: of fewer others, chance makes one too narrow."""

MARGIN = 1.0
"""Standard errors by which the prior is taken to be wider than estimated: with four to thirty
variances it is uncertain, and one that is too narrow makes false claims."""

TINY = 1e-20
"""A variance of rounding alone."""

WIDE = 1e6
"""Degrees of freedom of a prior that leaves no difference between configurations."""


@dataclass(frozen=True)
class Scatter:
    """Variance of one repeat's logarithm."""

    variance: float
    freedom: float
    is_noisy: bool = False
    """More than the other configurations' noise allows."""


def scatters(samples: Sequence[Sample]) -> list[Scatter | None]:
    """Of each configuration of a machine; None where fewer than MIN_REPEATS repeats or none vary.

    Empty where too few configurations vary to learn anything from the others.
    """
    logs = [{key: math.log(value) for key, value in each.items()} for each in samples]
    varying = [n for n, each in enumerate(logs) if len(each) >= MIN_REPEATS and _varies(each)]
    if len(varying) < MIN_ROWS:
        return []
    noisy: set[int] = set()
    while True:
        quiet = [n for n in varying if n not in noisy]
        own = dict(zip(quiet, _residual([logs[n] for n in quiet]), strict=True))
        if min(freedom for _, freedom in own.values()) < 1:
            return []  # hardly a repeat in common
        worst = _noisiest(own)
        if worst is None:
            break
        noisy.add(worst)
        if len(quiet) <= MIN_PRIOR:
            break  # named, and in the prior all the same
    found = {n: replace(each, is_noisy=n in noisy) for n, each in _moderated(own).items()}
    found |= {n: _alone(logs[n], [logs[q] for q in quiet]) for n in noisy - set(quiet)}
    return [found.get(n) for n in range(len(samples))]


def _alone(logs: Mapping[Hashable, float], quiet: Sequence[Mapping[Hashable, float]]) -> Scatter:
    """A noisy configuration's own variance, without what the others' repeats share."""
    others = [each for each in quiet if logs.keys() <= each.keys()]
    shared = {key: fmean([each[key] for each in others]) for key in logs} if others else {}
    rest = [value - shared.get(key, 0.0) for key, value in logs.items()]
    return Scatter(variance(rest), len(rest) - 1, is_noisy=True)


def compare(base: Sample, others: Sequence[Sample]) -> tuple[list[Ratio | None], list[bool]]:
    """Each of `others` over `base`, and which of all (the base first) are noisy.

    The decisions are those of single comparisons; see `statistics.correct`.
    """
    found = scatters([base, *others])
    if not found:
        return [ratio(base, other) for other in others], [False] * (len(others) + 1)
    ratios = [
        _over(base, other, found[0], second)
        for other, second in zip(others, found[1:], strict=True)
    ]
    return ratios, [bool(each and each.is_noisy) for each in found]


def _over(
    base: Sample, other: Sample, first: Scatter | None, second: Scatter | None
) -> Ratio | None:
    shared = [key for key in base if key in other]
    if len(shared) < MIN_REPEATS or first is None or second is None:
        return ratio(base, other)
    mean = fmean([math.log(other[key] / base[key]) for key in shared])
    error = (first.variance + second.variance) / len(shared)
    # Of the less certain one: Satterthwaite's sum makes false claims where noise differs.
    freedom = min(each.freedom for each in (first, second) if each.variance or not error)
    return decide(mean, math.sqrt(error), freedom, len(shared))


def _varies(logs: Mapping[Hashable, float]) -> bool:
    return max(logs.values()) > min(logs.values())


def _residual(logs: Sequence[Mapping[Hashable, float]]) -> list[tuple[float, float]]:
    """Sum of squares about the configuration and the repeat, and its degrees of freedom."""
    rows = [dict(each) for each in logs]
    repeats: dict[Hashable, list[int]] = {}
    for n, each in enumerate(rows):
        for key in each:
            repeats.setdefault(key, []).append(n)
    for _ in range(20):  # one is enough where all have the same repeats
        moved = 0.0
        for key, members in repeats.items():
            mean = fmean([rows[n][key] for n in members])
            moved = max(moved, abs(mean))
            for n in members:
                rows[n][key] -= mean
        for each in rows:
            mean = fmean(each.values())
            for key in each:
                each[key] -= mean
        if moved < 1e-12:
            break
    return [
        (
            math.fsum(value**2 for value in each.values()),
            (1 - 1 / len(each)) * math.fsum(1 - 1 / len(repeats[key]) for key in each),
        )
        for each in rows
    ]


def _noisiest(own: Mapping[int, tuple[float, float]]) -> int | None:
    """The configuration that is noisier than the prior of all others allows, if there is one."""
    from scipy.special import fdtrc

    worst = max(own, key=lambda n: own[n][0] / own[n][1])
    squares, freedom = own[worst]
    center, prior = _prior([each for n, each in own.items() if n != worst])
    p = fdtrc(freedom, prior, squares / freedom / center)
    return worst if p * len(own) < 1 - LEVEL else None


def _moderated(own: Mapping[int, tuple[float, float]]) -> dict[int, Scatter]:
    center, prior = _prior(list(own.values()), MARGIN)
    total = sum(freedom for _, freedom in own.values())
    return {
        n: Scatter((prior * center + squares) / (prior + freedom), min(prior + freedom, total))
        for n, (squares, freedom) in own.items()
    }


def _prior(own: Sequence[tuple[float, float]], margin: float = 0.0) -> tuple[float, float]:
    """Center and degrees of freedom of the prior that the variances are drawn from."""
    from scipy.special import polygamma, psi

    total = sum(freedom for _, freedom in own)
    pooled = sum(squares for squares, _ in own) / total
    logs, spread = [], []
    for squares, freedom in own:
        half = freedom / 2
        logs.append(
            math.log(max(squares / freedom, 1e-5 * pooled, TINY)) - psi(half) + math.log(half)
        )
        spread.append(float(polygamma(1, half)))
    beyond = variance(logs) - fmean(spread) * (1 - margin * math.sqrt(2 / len(own)))
    if beyond <= 0:
        return max(pooled, TINY), WIDE
    half = _inverse_trigamma(beyond)
    return math.exp(fmean(logs) + psi(half) - math.log(half)), 2 * half


def _inverse_trigamma(value: float) -> float:
    """By Newton's method on its inverse, which is convex (Smyth 2004, appendix)."""
    from scipy.special import polygamma

    found = 0.5 + 1 / value
    for _ in range(50):
        now = float(polygamma(1, found))
        step = now * (1 - now / value) / float(polygamma(2, found))
        found += step
        if -step / found < 1e-8:
            break
    return found
