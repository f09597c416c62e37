"""Differences between configurations, with intervals and decisions.

The method is described in notes/report_statistics.md. Its sources: Holm's method
(https://en.wikipedia.org/wiki/Holm%E2%80%93Bonferroni_method), intervals of its levels
(Strassburger & Bretz 2008, Guilbaud 2008), and the prior of each variance (Smyth 2004,
https://doi.org/10.2202/1544-6115.1027), since three repeats of one configuration do not find a
difference of 10 % among twelve. It is around a common variance, or, for one configuration on
average, anywhere above it, so that a noisy configuration does not widen the others (Phipson et al.
2016, https://doi.org/10.1214/16-AOAS920). benchmarks/report_power.py measures errors and power.
"""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from statistics import NormalDist, fmean
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

ALPHA = 0.05
"""Chance of a false claim among all comparisons with one baseline in one measure."""

MIN_REPEATS = 3
"""Repeats needed for an interval: with two, Student's t is 12.7 standard errors."""

SAME = 0.02
"""Two values count as equal if the interval of their ratio is within this of 1."""

Sample = Mapping[Hashable, float]
"""Repeat -> measured value. Ratios require positive values."""

_Array = NDArray[Any]

K = TypeVar("K", bound=Hashable)


class Significance(Enum):
    """Statistical decision about a ratio."""

    higher = "higher"
    lower = "lower"
    same = "same"  # the whole interval is within SAME
    unresolved = "not decided"
    single = "too few repeats"


@dataclass(frozen=True)
class Estimate:
    """Mean of one configuration over `n` repeats."""

    value: float
    n: int


@dataclass(frozen=True)
class Ratio:
    """Ratio of a quantity to the baseline's, as `correct` tested it."""

    value: float
    low: float | None
    """Ends of the interval of `1 - level`, or None with too few repeats."""
    high: float | None
    n: int
    """Runs, or pairs of runs, of the smaller side."""
    decision: Significance
    """Decision by the interval: `higher` and `lower` exclude 1."""
    p: float | None = None
    """P-value of equality, uncorrected."""
    level: float = ALPHA
    """Level of Holm's test of this ratio."""


REFINEMENTS, PLACES = 5, np.linspace(0.0, 1.0, 9)
"""Iterations that narrow the half of an interval, and their places, for 1e-7 of it. scipy.optimize
is slow to import."""


@dataclass(frozen=True, eq=False)
class Error:
    """Error of a mean difference: Student's t, averaged over the variances that it may have."""

    variances: _Array
    """Possible variances of the mean difference, (..., number), with their chances."""
    chances: _Array
    freedom: _Array | float
    """Degrees of freedom of each, or infinite for a normal distribution."""
    n: float
    """Repeats in the mean."""

    @property
    def spread(self) -> float:
        """Typical standard deviation of the difference in one repeat."""
        if not self.variances.any():
            return 0.0
        # The mean of logarithms: a small chance of much noise is not typical.
        return math.sqrt(math.exp(float(self.chances @ np.log(self.variances))) * self.n)

    @property
    def rms(self) -> float:
        """The same by the mean variance, which is larger if the configuration may be noisy."""
        return math.sqrt(float(self.chances @ self.variances) * self.n)

    def beyond(self, distance: float | _Array) -> _Array:
        """Return the chance of a mean difference at least this large, to either side, by noise."""
        from scipy.special import stdtr  # here: 0.1 s that `eke --help` does without

        if not self.variances.any():
            return np.asarray(distance == 0.0, float)
        scores = -np.abs(np.asarray(distance)[..., None]) / np.sqrt(self.variances)
        chance: _Array = 2 * (self.chances * stdtr(self.freedom, scores)).sum(-1)
        return chance

    def half(self, level: float) -> float:
        """Return half of the interval of `1 - level`."""
        from scipy.special import stdtrit

        # If one of the variances were certain, the half would be one of these.
        halves = stdtrit(self.freedom, 1 - level / 2) * np.sqrt(self.variances)
        if halves.size == 1:
            return float(halves.item())
        near, far = 0.99 * halves.min(), 1.01 * halves.max()
        for _ in range(REFINEMENTS):
            places = near * (far / near) ** PLACES
            after = min(max(int((self.beyond(places) > level).sum()), 1), len(PLACES) - 1)
            near, far = places[after - 1], places[after]
        above, below = self.beyond(np.array([near, far]))
        return float(near + (far - near) * (above - level) / (above - below))


@dataclass(frozen=True)
class Difference:
    """Mean difference from the baseline: of logarithms, or in a metric's unit. Not yet corrected.

    Levels of tests come from `holm_levels`.
    """

    mean: float
    n: int
    """Runs, or pairs of runs, of the smaller side."""
    error: Error | None = None
    """None with too few repeats."""

    @cached_property
    def p(self) -> float | None:
        """Two-sided p-value of no difference, or None with too few repeats."""
        return None if self.error is None else float(self.error.beyond(self.mean))

    @property
    def is_exact(self) -> bool:
        """True if the repeats never vary, as bytes do. Such a difference needs no test."""
        return self.error is not None and self.error.rms == 0.0

    def interval(self, level: float = ALPHA) -> tuple[float, float] | None:
        """Return the ends of the interval of `1 - level`, or None with too few repeats."""
        if self.error is None:
            return None
        half = self.error.half(level)
        return self.mean - half, self.mean + half

    def p_same(self, margin: float) -> float | None:
        """Return the p-value of two one-sided tests of a difference beyond +-`margin`.

        By Schuirmann 1987. `margin` has the unit of `mean`: log(1.05) for 5 %.
        """
        if self.error is None:
            return None
        room = margin - abs(self.mean)
        half = 0.5 * float(self.error.beyond(room))
        return half if room > 0 else 1 - half

    def repeats_needed(self, level: float, same: float | None = None) -> float | None:
        """Return the total repeats after which a direction is shown in 4 of 5 cases.

        The difference is taken as large as this mean, with its noise. Sameness within `same`, as of
        `p_same`, also counts. Infinite for a mean of 0 without it, None with too few repeats.
        """
        if self.error is None:
            return None
        far = abs(self.mean) if same is None else max(abs(self.mean), same - abs(self.mean))
        return repeats_to_show(far, self.error.rms, level, power=0.8)


def repeats_to_show(distance: float, spread: float, level: float, power: float = 0.9) -> float:
    """Return the repeats, at least MIN_REPEATS, that show a difference with chance `power`.

    By the normal rule n = (z(level / 2) + z(power))^2 (spread / distance)^2. `spread` is the
    standard deviation of one repeat's difference: sqrt(2) times the noise of one run.
    """
    if distance <= 0:
        return math.inf
    quantiles = -NormalDist().inv_cdf(level / 2) + NormalDist().inv_cdf(power)
    return max(float(MIN_REPEATS), (quantiles * spread / distance) ** 2)


def holm_levels(differences: Mapping[K, Difference], level: float = ALPHA) -> dict[K, float]:
    """Return the level at which Holm's method tests each comparison with one baseline.

    The k-th smallest p-value of m is tested at level / (m - k + 1) while all before were resolved,
    the others at level / (m - number resolved). Exact differences and differences with too few
    repeats are not tested and do not count in m.
    """
    p = {
        key: each.p for key, each in differences.items()
        if each.p is not None and not each.is_exact
    }  # fmt: skip
    levels, left, holds = dict.fromkeys(differences, level), len(p), True
    for key in sorted(p, key=lambda key: p[key]):
        levels[key] = level / left
        holds = holds and p[key] <= levels[key]
        left -= holds
    return levels


def correct(differences: Mapping[K, Difference], level: float = ALPHA) -> dict[K, Ratio]:
    """Return the ratios of comparisons with one baseline, tested by Holm's method."""
    levels = holm_levels(differences, level)
    return {key: ratio_of(each, levels[key]) for key, each in differences.items()}


def correct_all(
    differences: Sequence[Mapping[str, Difference]], level: float = ALPHA
) -> list[dict[str, Ratio]]:
    """Return the ratios of several comparisons by measure. Each measure is one family."""
    decided = {
        key: correct({n: each[key] for n, each in enumerate(differences) if key in each}, level)
        for key in dict.fromkeys(key for each in differences for key in each)
    }
    return [{key: decided[key][n] for key in each} for n, each in enumerate(differences)]


def ratio_of(difference: Difference, level: float = ALPHA) -> Ratio:
    """Return the ratio of a difference of logarithms, tested at this level."""
    value, n, ends = math.exp(difference.mean), difference.n, difference.interval(level)
    if ends is None:
        return Ratio(value, None, None, n, Significance.single, level=level)
    low, high = map(math.exp, ends)
    decision = Significance.higher if low > 1 else Significance.unresolved
    decision = Significance.lower if high < 1 else decision
    decision = Significance.same if low >= 1 - SAME and high <= 1 + SAME else decision
    return Ratio(value, low, high, n, decision, difference.p, level)


def estimate(sample: Sample, is_log: bool = True) -> Estimate | None:
    """Return the geometric or, without `is_log`, arithmetic mean, or None without values."""
    values = sample.values()
    if not values:
        return None
    mean = math.exp(fmean(map(math.log, values))) if is_log else fmean(values)
    return Estimate(mean, len(values))


def mean_difference(differences: Collection[float], floor: float = 0.0) -> Difference:
    """Return the mean of differences of paired runs, with Student's t.

    `floor` is the least variance of one difference: the variance of rounding.
    """
    mean, n = fmean(differences), len(differences)
    if n < MIN_REPEATS:
        return Difference(mean, n)
    return _by_student(mean, n, max(_variance(differences), floor) / n, n - 1)


def _variance(values: Collection[float]) -> float:
    """Return the unbiased variance in floats, ten times as fast as the standard library's."""
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _by_student(mean: float, n: int, variance: float, freedom: float) -> Difference:
    found = variance if variance * n > _TINY else 0.0
    return Difference(mean, n, Error(np.array([found]), np.ones(1), freedom, n))


def difference_of(base: Sample, other: Sample, floor: float = 0.0) -> Difference:
    """Return the second sample's mean less the first's, by their own noise.

    With fewer than three common repeats by Welch's t, with Welch-Satterthwaite's degrees of
    freedom. `floor` is as of `mean_difference`.
    """
    shared = [key for key in base if key in other]
    if len(shared) >= MIN_REPEATS:
        return mean_difference([other[key] - base[key] for key in shared], floor)
    if shared and min(len(base), len(other)) < MIN_REPEATS:  # no drift between other repeats
        base, other = ({key: each[key] for key in shared} for each in (base, other))
    sides = [list(sample.values()) for sample in (base, other)]
    mean, n = fmean(sides[1]) - fmean(sides[0]), min(map(len, sides))
    if n < MIN_REPEATS:
        return Difference(mean, n)
    parts = [max(_variance(each), floor / 2) / len(each) for each in sides]
    weights = [part**2 / (len(each) - 1) for part, each in zip(parts, sides, strict=True)]
    return _by_student(mean, n, sum(parts), sum(parts) ** 2 / sum(weights) if any(parts) else n - 1)


MIN_ROWS = 4
"""Configurations needed to fit a prior. Fewer are compared by their own noise."""

_STEP = 0.5
GRID = np.arange(-6.0, 14.1, _STEP)
"""Logarithms of variances, over the median one."""

_VARIANCES = np.exp(GRID)

_CENTERS = np.arange(-3.0, 3.1, _STEP)
_WIDTHS = (0.0, 0.5, 1.0)
"""Standard deviations of the logarithms of quiet configurations' variances, equally likely."""

_ALL_QUIET = 0.8
"""Chance, over the number of configurations, that all are quiet. Else each is noisy with the chance
of 1 over their number. Chosen by simulation, as WIDTHS and SURE."""

FAR, RARE = 5.0, 0.1
"""A noisy variance is up to e^5 (12 times the standard deviation) above the center, equally likely
there, and RARE times as likely further up."""

NOISY, SURE = math.log(4.0), 0.6
"""A configuration is named noisy if its noise is twice the others' with this probability."""

_TINY = 1e-20
"""Variance that comes from rounding of floats."""


class Noise:
    """Posterior of the noise of several configurations.

    `logs` are logarithms, (..., repeats, configurations), NaN if missing. Each has two or more.
    `floor`, the variance of rounding, is added to each variance.
    """

    def __init__(self, logs: _Array, floor: float = 0.0) -> None:
        rest = logs - np.nanmean(logs, axis=-2, keepdims=True)
        self._prior, self._centers, chance = _priors(logs.shape[-1])
        apart = np.nansum((rest - np.nanmedian(rest, axis=-1, keepdims=True)) ** 2, axis=-2)
        weight = 1 / np.maximum(apart + np.median(apart, axis=-1, keepdims=True), _TINY)
        for _ in range(4):  # the shared part of repeats and each configuration's weight in it
            rest, squares, freedom = _residual(rest, weight)
            squares += floor * freedom
            own = squares / freedom
            least = np.maximum(own.max(-1) * math.exp(2 - GRID[-1]), _TINY)  # all are on the grid
            self.scale = np.maximum(np.median(own, axis=-1), least)[..., None]
            relative = (squares / self.scale)[..., None]
            like = -0.5 * (freedom[..., None] * GRID + relative / _VARIANCES)
            self._like = np.exp(like - like.max(-1, keepdims=True))
            evidence = np.maximum(self._like @ self._prior.T, 1e-250)
            total = np.log(evidence).sum(-2) + np.log(chance)
            self._chance = np.exp(total - total.max(-1, keepdims=True))
            self._chance /= self._chance.sum(-1, keepdims=True)
            self._over = 1 / evidence
            found = self._like * ((self._chance[..., None, :] * self._over) @ self._prior)
            weight = found @ (1 / _VARIANCES)

    def _variances(self, one: int) -> _Array:
        """Return the chances of GRID's variances for one configuration, by prior."""
        like, over = self._like[..., one, None, :], self._over[..., one, :, None]
        chances: _Array = like * self._prior * over
        return chances

    def sums(self, configurations: Sequence[int]) -> _Array:
        """Return the chances of GRID's values for the sum of some configurations' variances."""
        *others, last = map(self._variances, configurations)
        total = others[0]
        for each in others[1:]:
            pairs = total[..., :, None] * each[..., None, :]
            total = pairs.reshape(*total.shape[:-1], -1) @ _addition()
        joint = np.swapaxes(total, -1, -2) @ (self._chance[..., None] * last)
        chances: _Array = joint.reshape(*joint.shape[:-2], -1) @ _addition()
        return chances

    def error(self, configurations: Sequence[int], n: int, pairs: int = 1) -> Error:
        """Return the error of the mean over `n` repeats and `pairs` pairs of configurations."""
        variances = _VARIANCES * self.scale / (n * pairs**2)
        return Error(variances, self.sums(configurations), math.inf, n)

    def is_noisy(self, one: int) -> _Array:
        """Return whether one configuration is noisier than the others, with probability SURE."""
        above = self._centers[:, None] + NOISY <= GRID
        sure: _Array = (self._chance * (self._variances(one) * above).sum(-1)).sum(-1) > SURE
        return sure


class Compared:
    """Comparisons of one machine's configurations in one measure, with the noise of all of them.

    `is_log` compares logarithms of positive values, else values. `floor`: variance of rounding.
    """

    def __init__(
        self, samples: Mapping[Any, Sample], is_log: bool = True, floor: float = 0.0
    ) -> None:
        self._floor = floor
        self._samples: Mapping[Any, Sample] = samples
        if is_log:
            self._samples = {
                key: {repeat: math.log(value) for repeat, value in sample.items()}
                for key, sample in samples.items()
            }
        varying = [
            key for key, each in self._samples.items()
            if len(each) >= MIN_REPEATS and (floor or max(each.values()) > min(each.values()))
        ]  # fmt: skip
        self._place = {key: n for n, key in enumerate(varying)}
        self._noise: Noise | None = None
        if len(varying) >= MIN_ROWS:
            repeats = list(dict.fromkeys(repeat for key in varying for repeat in samples[key]))
            rows = [[self._samples[key].get(r, math.nan) for key in varying] for r in repeats]
            self._noise = Noise(np.array(rows), floor)

    def is_noisy(self, key: Hashable) -> bool:
        """Return whether a configuration is noisier than the others."""
        place = self._place.get(key)
        return bool(self._noise and place is not None and self._noise.is_noisy(place))

    def difference(self, *pairs: tuple[Hashable, Hashable]) -> Difference | None:
        """Return the mean over pairs of the second less the first, or None without values."""
        keys = [each for each in pairs if all(self._samples[key] for key in each)]
        sides = [(self._samples[a], self._samples[b]) for a, b in keys]
        shared = [[r for r in first if r in second] for first, second in sides]
        n, members = min(map(len, shared), default=0), [key for pair in pairs for key in pair]
        if n < MIN_REPEATS or self._noise is None or not all(k in self._place for k in members):
            return self._by_own_noise(sides)
        means = [
            fmean([b[r] - a[r] for r in each]) for (a, b), each in zip(sides, shared, strict=True)
        ]
        places = [self._place[key] for key in members]
        return Difference(fmean(means), n, self._noise.error(places, n, len(pairs)))

    def _by_own_noise(self, sides: Sequence[tuple[Sample, Sample]]) -> Difference | None:
        """Return the mean over pairs of samples by the noise of these samples."""
        if len(sides) < 2:
            return difference_of(*sides[0], 2 * self._floor) if sides else None
        both = [r for r in sides[0][0] if all(r in each for side in sides for each in side)]
        if len(both) < MIN_REPEATS:
            return mean_difference([difference_of(a, b).mean for a, b in sides])
        floor = 2 * self._floor / len(sides)
        return mean_difference([fmean([b[r] - a[r] for a, b in sides]) for r in both], floor)


LEAST, SLOW, AGREE = 4, 8.0, 4.0
"""Repeats that a configuration needs, robust standard deviations of all by which a run must be
slower, and deviations within which the others agree. Chosen by simulation, as the least factor of
1.15: 4 % of runs that are 30 to 70 % slow hide 42 % of differences of 10 % from ten repeats, and
then 9 %."""


def find_outliers(samples: Mapping[K, Sample]) -> dict[K, Any]:
    """Return the repeat that is excluded of each configuration with one, by samples of speeds."""
    rows = [key for key, sample in samples.items() if sample]
    repeats = list(dict.fromkeys(repeat for key in rows for repeat in samples[key]))
    if len(repeats) < LEAST:
        return {}
    logs: _Array = np.log([[samples[key].get(each, math.nan) for key in rows] for each in repeats])
    rest = logs - np.nanmedian(logs, axis=0)
    rest -= np.nanmedian(rest, axis=1, keepdims=True)  # slow for all: not this run
    sigma = 1.4826 * np.nanmedian(np.abs(rest)) + 1e-9  # of equal values
    found = {}
    for key, own in zip(rows, rest.T, strict=True):
        if len(samples[key]) >= LEAST:
            worst = int(np.nanargmin(own))
            agree = np.nanmax(np.abs(np.delete(own, worst))) <= AGREE * sigma
            if agree and own[worst] < -max(SLOW * sigma, math.log(1.15)):
                found[key] = repeats[worst]
    return found


def _residual(rest: _Array, weight: _Array) -> tuple[_Array, _Array, _Array]:
    """Return residuals of the repeats' weighted means, their squares and degrees of freedom."""
    known = ~np.isnan(rest)
    weights = np.where(known, weight[..., None, :], 0.0)
    share = weights / weights.sum(-1, keepdims=True)
    rest = rest - (share * np.where(known, rest, 0.0)).sum(-1, keepdims=True)
    rest = rest - np.nanmean(rest, axis=-2, keepdims=True)  # configurations with fewer repeats
    freedom = (1 - 1 / known.sum(-2)) * np.where(known, 1 - share, 0.0).sum(-2)
    return rest, np.nansum(rest**2, axis=-2), np.maximum(freedom, 1e-9)


@cache
def _priors(rows: int) -> tuple[_Array, _Array, _Array]:
    """Return each prior's probabilities of GRID's variances, its center, and its probability."""
    priors, centers, chances = [], [], []
    for center in _CENTERS:
        above = GRID - center
        noisy = np.where(above < 0, 0.0, np.where(above > FAR, RARE, 1.0))
        noisy /= noisy.sum()
        for width in _WIDTHS:
            quiet = np.exp(-0.5 * (above / max(width, _STEP / 10)) ** 2)
            quiet /= quiet.sum()
            for share, chance in ((0.0, _ALL_QUIET / rows), (1 / rows, 1 - _ALL_QUIET / rows)):
                priors.append((1 - share) * quiet + share * noisy)
                centers.append(center)
                chances.append(chance)
    return np.array(priors), np.array(centers), np.array(chances)


@cache
def _addition() -> _Array:
    """Return chances of GRID's values for sums of two variances, with the same mean."""
    sums = _VARIANCES[:, None] + _VARIANCES
    low = np.clip(np.searchsorted(GRID, np.log(sums), "right") - 1, 0, len(GRID) - 2)
    below, above = _VARIANCES[low], _VARIANCES[low + 1]
    upper = np.clip((sums - below) / (above - below), 0.0, 1.0).ravel()
    added = np.zeros((sums.size, len(GRID)))
    places = np.arange(sums.size)
    added[places, low.ravel()] = 1 - upper
    added[places, low.ravel() + 1] = upper
    return added
