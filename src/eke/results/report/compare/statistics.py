"""Confidence intervals over repeats, and decisions about differences.

Rates and bytes are compared on a logarithmic scale, so that a ratio and its inverse have one
answer. A ratio's interval is Student's t over the differences of logarithms of runs that belong
together (the same repeat and seed, which a sweep measures close to each other, so that drift of the
machine cancels), or Welch's where too few belong together
(https://en.wikipedia.org/wiki/Welch%27s_t-test). Intervals hold 95 % each by itself; what is
claimed of several comparisons with one baseline is corrected for their number by Holm's method
(https://en.wikipedia.org/wiki/Holm%E2%80%93Bonferroni_method).

Three repeats leave two degrees of freedom to a configuration alone: too few to find a difference
of 10 % among twelve. So its noise is estimated with that of the others on the same machine. What
all configurations of a repeat share is removed first. Then each variance has a prior, as in Smyth
2004 (https://doi.org/10.2202/1544-6115.1027): around one that all share, or, for one configuration
in all of them, anywhere above it, so that a noisy one neither hides nor widens the others (Phipson
et al. 2016, https://doi.org/10.1214/16-AOAS920). How wide the prior is, is averaged over, by its
chance given all repeats; sums replace integrals. tests/unit/results/report/test_power.py and
benchmarks/report_power.py measure the errors and the power.
"""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
"""Coverage: fraction of intervals that contain the true value."""

MIN_REPEATS = 3
"""Repeats needed for an interval: with two, Student's t is 12.7 standard errors."""

SAME = 0.02
"""Two values count as equal if the interval of their ratio is within this of 1."""


class Significance(Enum):
    """Statistical decision about a ratio."""

    higher = "higher"
    lower = "lower"
    same = "same"
    """The whole interval is within SAME."""
    hint = "hint"
    """The interval excludes 1, but not after correction for multiple comparisons."""
    unresolved = "not resolved"
    single = "too few repeats"


@dataclass(frozen=True)
class Estimate:
    """Mean over repeats, with an interval if there are enough."""

    value: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Ratio:
    """Ratio of a quantity to the baseline's."""

    value: float
    low: float | None
    high: float | None
    n: int
    """Runs, or pairs of runs, of the smaller side."""
    decision: Significance
    p: float | None = None
    """P-value of equality, uncorrected."""


Sample = Mapping[Hashable, float]
"""Repeat -> measured value; positive."""


def estimate(sample: Sample) -> Estimate | None:
    """Geometric mean with its interval; None without values."""
    found = mean_of([math.log(value) for value in sample.values()])
    if found is None:
        return None
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return Estimate(math.exp(found.value), low, high, found.n)


def mean_of(values: Collection[float]) -> Estimate | None:
    """Arithmetic mean with its interval, of what may be 0 or negative; None without values."""
    if not values:
        return None
    mean, n = fmean(values), len(values)
    if n < MIN_REPEATS:
        return Estimate(mean, None, None, n)
    half = quantile(n - 1) * math.sqrt(variance(values) / n)
    return Estimate(mean, mean - half, mean + half, n)


def ratio(base: Sample, other: Sample) -> Ratio | None:
    """`other` over `base` with its interval; None if one of them is empty.

    The decision is the one of a single comparison; see `correct`.
    """
    if not base or not other:
        return None
    shared = [key for key in base if key in other]
    if len(shared) >= MIN_REPEATS:
        return of_logs([math.log(other[key] / base[key]) for key in shared])
    if shared and min(len(base), len(other)) < MIN_REPEATS:  # no drift between other repeats
        base, other = ({key: each[key] for key in shared} for each in (base, other))
    first, second = ([math.log(v) for v in sample.values()] for sample in (base, other))
    mean, n = fmean(second) - fmean(first), min(len(first), len(second))
    if n < MIN_REPEATS:
        return Ratio(math.exp(mean), None, None, n, Significance.single)
    return _by_t(mean, *_welch(first, second), n)


def of_logs(logs: Sequence[float]) -> Ratio:
    """Ratio and interval from logarithms of ratios."""
    mean, n = fmean(logs), len(logs)
    if n < MIN_REPEATS:
        return Ratio(math.exp(mean), None, None, n, Significance.single)
    return _by_t(mean, math.sqrt(variance(logs) / n), n - 1, n)


def correct(ratios: Mapping[Hashable, Ratio]) -> dict[Hashable, Ratio]:
    """Correct the decisions of several comparisons with one baseline by Holm's method."""
    tested = sorted(
        (key for key, each in ratios.items() if each.p is not None),
        key=lambda key: ratios[key].p or 0.0,
    )
    decided, holds = dict(ratios), True
    for rank, key in enumerate(tested):
        each = ratios[key]
        holds = holds and (each.p or 0.0) <= (1 - LEVEL) / (len(tested) - rank)
        if not holds and each.decision in (Significance.higher, Significance.lower):
            decided[key] = replace(each, decision=Significance.hint)
    return decided


def correct_all(ratios: Sequence[Mapping[str, Ratio]]) -> list[dict[str, Ratio]]:
    """Correct measure -> ratio of several comparisons, each measure by itself."""
    decided = {
        key: correct({n: each[key] for n, each in enumerate(ratios) if key in each})
        for key in dict.fromkeys(key for each in ratios for key in each)
    }
    return [{key: decided[key][n] for key in each} for n, each in enumerate(ratios)]


def variance(values: Collection[float]) -> float:
    """Unbiased variance in floats, ten times as fast as the standard library's."""
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
    from scipy.special import stdtr

    p = float(2 * stdtr(freedom, -abs(mean) / error)) if error else float(mean == 0.0)
    return ratio_of(mean, quantile(freedom) * error, p, n)


def _decision(low: float, high: float) -> Significance:
    if low >= 1 - SAME and high <= 1 + SAME:
        return Significance.same
    if low > 1:
        return Significance.higher
    return Significance.lower if high < 1 else Significance.unresolved


def _welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Standard error of the difference of two means, and Welch-Satterthwaite's freedom."""
    parts = [variance(each) / len(each) for each in (first, second)]
    total = sum(parts)
    if total == 0.0:
        return 0.0, min(len(first), len(second)) - 1
    weights = [part**2 / (len(each) - 1) for part, each in zip(parts, (first, second), strict=True)]
    return math.sqrt(total), total**2 / sum(weights)


Array = NDArray[Any]

MIN_ROWS = 4
"""With fewer there is nothing to fit a prior to: each comparison stands by itself."""

STEP = 0.5
GRID = np.arange(-6.0, 14.1, STEP)
"""Logarithms of variances, over the median one."""

CENTERS = np.arange(-3.0, 3.1, STEP)
WIDTHS = (0.0, 0.5, 1.0)
"""Standard deviation of the logarithms of quiet configurations' variances: equally likely."""

ALL_QUIET = 0.8
"""Over the number of configurations: the chance that none is noisy; else each one is with the
chance of 1 in all. Chosen by simulation, as the widths and SURE."""

FAR, RARE = 5.0, 0.1
"""A noisy variance lies up to e^5 (12 times the standard deviation) above, equally likely there; a
tenth as likely further up."""

NOISY, SURE = math.log(4.0), 0.6
"""A configuration is named where its noise is twice the others' with this probability."""

TINY = 1e-20
"""A variance of rounding alone."""

ROUNDS = 4
"""Of what repeats share and how much each configuration says about it."""


class Noise:
    """Posterior of the noise of some configurations: likelihoods and probabilities of priors.

    From logarithms, (..., repeats, configurations), NaN where one is missing; two or more each.
    """

    def __init__(self, logs: Array) -> None:
        rest = logs - np.nanmean(logs, axis=-2, keepdims=True)
        self._prior, self._centers, chance = _priors(logs.shape[-1])
        apart = np.nansum((rest - np.nanmedian(rest, axis=-1, keepdims=True)) ** 2, axis=-2)
        weight = 1 / np.maximum(apart + np.median(apart, axis=-1, keepdims=True), TINY)
        for _ in range(ROUNDS):
            rest, squares, freedom = _residual(rest, weight)
            own = squares / freedom
            least = np.maximum(own.max(-1) * math.exp(2 - GRID[-1]), TINY)  # all are on the grid
            self.scale = np.maximum(np.median(own, axis=-1), least)[..., None]
            relative = (squares / self.scale)[..., None]
            like = -0.5 * (freedom[..., None] * GRID + relative * np.exp(-GRID))
            self._like = np.exp(like - like.max(-1, keepdims=True))
            evidence = np.maximum(self._like @ self._prior.T, 1e-250)
            told = np.log(evidence).sum(-2) + np.log(chance)
            self._chance = np.exp(told - told.max(-1, keepdims=True))
            self._chance /= self._chance.sum(-1, keepdims=True)
            self._over = 1 / evidence
            found = self._like * ((self._chance[..., None, :] * self._over) @ self._prior)
            weight = found @ np.exp(-GRID)

    def variances(self, one: int) -> Array:
        """Of each prior: chances of GRID's variances for one configuration."""
        like, over = self._like[..., one, None, :], self._over[..., one, :, None]
        chances: Array = like * self._prior * over
        return chances

    def sums(self, configurations: Sequence[int]) -> Array:
        """Chances of GRID's values for the sum of some configurations' variances."""
        *others, last = map(self.variances, configurations)
        total = others[0]
        for each in others[1:]:
            pairs = total[..., :, None] * each[..., None, :]
            total = pairs.reshape(*total.shape[:-1], -1) @ _addition()
        joint = np.swapaxes(total, -1, -2) @ (self._chance[..., None] * last)
        chances: Array = joint.reshape(*joint.shape[:-2], -1) @ _addition()
        return chances

    def is_noisy(self, one: int) -> Array:
        """Whether one configuration is noisier than the others, with probability SURE."""
        above = self._centers[:, None] + NOISY <= GRID
        sure: Array = (self._chance * (self.variances(one) * above).sum(-1)).sum(-1) > SURE
        return sure


def chance_beyond(distance: Array, sums: Array, scale: Array, n: int) -> Array:
    """Probability that means of `n` repeats differ by this distance of logarithms by noise alone.

    `sums` of variances and their `scale` are as of `Noise`.
    """
    from scipy.special import erfc

    errors = np.sqrt(2 * np.exp(GRID) * scale / n)
    chance: Array = (sums * erfc(np.abs(distance)[..., None] / errors)).sum(-1)
    return chance


class Compared:
    """Comparisons of one machine's configurations in one measure, with the noise of all of them."""

    def __init__(self, samples: Mapping[Hashable, Sample]) -> None:
        self._samples = samples
        varying = [
            key for key, each in samples.items()
            if len(each) >= MIN_REPEATS and max(each.values()) > min(each.values())
        ]  # fmt: skip
        self._place = {key: n for n, key in enumerate(varying)}
        self._noise: Noise | None = None
        if len(varying) >= MIN_ROWS:
            repeats = list(dict.fromkeys(repeat for key in varying for repeat in samples[key]))
            rows = [[samples[key].get(r, math.nan) for key in varying] for r in repeats]
            self._noise = Noise(np.log(np.array(rows)))

    def is_noisy(self, key: Hashable) -> bool:
        """Whether a configuration is noisier than the others."""
        noise, place = self._noise, self._place.get(key)
        return noise is not None and place is not None and bool(noise.is_noisy(place))

    def ratio(self, *pairs: tuple[Hashable, Hashable]) -> Ratio | None:
        """The second over the first, the geometric mean of all pairs; None if nothing is there.

        The decision is the one of a single comparison; see `statistics.correct`.
        """
        sides = [(self._samples[a], self._samples[b]) for a, b in pairs]
        sides = [(first, second) for first, second in sides if first and second]
        shared = [[r for r in first if r in second] for first, second in sides]
        n = min(map(len, shared), default=0)
        members = [key for pair in pairs for key in pair]
        if n < MIN_REPEATS or self._noise is None or not all(k in self._place for k in members):
            found = [each for first, second in sides if (each := ratio(first, second))]
            if len(found) < 2:
                return found[0] if found else None
            both = [r for r in shared[0] if all(r in each for each in shared)]
            logs = [[math.log(b[r] / a[r]) for r in both] for a, b in sides]
            if len(both) < MIN_REPEATS:
                return of_logs([math.log(each.value) for each in found])
            return of_logs([math.fsum(of_one) / len(sides) for of_one in zip(*logs, strict=True)])
        means = [
            math.fsum(math.log(b[r] / a[r]) for r in each) / len(each)
            for (a, b), each in zip(sides, shared, strict=True)
        ]
        sums, scale = self._noise.sums([self._place[k] for k in members]), self._noise.scale
        distance, n = math.fsum(means) / len(means), n * len(pairs) ** 2
        p = float(chance_beyond(np.array(distance), sums, scale, n))
        return ratio_of(distance, _half(sums, scale, n), p, n // len(pairs) ** 2)


def _half(sums: Array, scale: Array, n: int) -> float:
    """Half of the interval: the difference with probability 1 - LEVEL."""
    from scipy.optimize import brentq

    def excess(x: float) -> float:
        return float(chance_beyond(np.array(x), sums, scale, n)) - (1 - LEVEL)

    errors = np.sqrt(np.exp(GRID) * scale / n)
    return float(brentq(excess, 0.0, 10 * float(errors[-1]), rtol=1e-6, xtol=1e-12))


def _residual(rest: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Residuals of the repeats' weighted means, their squares and degrees of freedom."""
    known = ~np.isnan(rest)
    weights = np.where(known, weight[..., None, :], 0.0)
    share = weights / weights.sum(-1, keepdims=True)
    rest = rest - (share * np.where(known, rest, 0.0)).sum(-1, keepdims=True)
    rest = rest - np.nanmean(rest, axis=-2, keepdims=True)  # of those with fewer repeats
    freedom = (1 - 1 / known.sum(-2)) * np.where(known, 1 - share, 0.0).sum(-2)
    return rest, np.nansum(rest**2, axis=-2), np.maximum(freedom, 1e-9)


@cache
def _priors(rows: int) -> tuple[Array, Array, Array]:
    """Each prior's probabilities of GRID's variances, its center, and its probability."""
    priors, centers, chances = [], [], []
    for center in CENTERS:
        above = GRID - center
        noisy = np.where(above < 0, 0.0, np.where(above > FAR, RARE, 1.0))
        noisy /= noisy.sum()
        for width in WIDTHS:
            quiet = np.exp(-0.5 * (above / max(width, STEP / 10)) ** 2)
            quiet /= quiet.sum()
            for share, chance in ((0.0, ALL_QUIET / rows), (1 / rows, 1 - ALL_QUIET / rows)):
                priors.append((1 - share) * quiet + share * noisy)
                centers.append(center)
                chances.append(chance)
    return np.array(priors), np.array(centers), np.array(chances)


@cache
def _addition() -> Array:
    """Chances of two of GRID's variances -> of their sum, with the same mean."""
    sums = np.exp(GRID)[:, None] + np.exp(GRID)
    low = np.clip(np.searchsorted(GRID, np.log(sums), "right") - 1, 0, len(GRID) - 2)
    below, above = np.exp(GRID[low]), np.exp(GRID[low + 1])
    upper = np.clip((sums - below) / (above - below), 0.0, 1.0).ravel()
    added = np.zeros((sums.size, len(GRID)))
    places = np.arange(sums.size)
    added[places, low.ravel()] = 1 - upper
    added[places, low.ravel() + 1] = upper
    return added
