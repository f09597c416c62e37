"""Differences between configurations: their intervals, and what is decided about them.

Rates, bytes and losses are compared on a logarithmic scale, so that a ratio and its inverse have
one answer; metrics in their own unit. A difference is Student's t over the differences of runs that
belong together (the same repeat and seed, which a sweep measures close to each other, so that drift
of the machine cancels), or Welch's where too few belong together
(https://en.wikipedia.org/wiki/Welch%27s_t-test). Several comparisons with one baseline are tested
by Holm's method (https://en.wikipedia.org/wiki/Holm%E2%80%93Bonferroni_method), and an interval is
shown at the level at which Holm tested it: a decision never contradicts its interval, and all
intervals of a table hold together (Strassburger & Bretz 2008, Guilbaud 2008).

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
from abc import ABC, abstractmethod
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


class Significance(Enum):
    """Statistical decision about a ratio."""

    higher = "higher"
    lower = "lower"
    same = "same"
    """The whole interval is within SAME."""
    unresolved = "not decided"
    single = "too few repeats"


@dataclass(frozen=True)
class Estimate:
    """Mean over repeats; what is claimed of it, is claimed of its difference from the baseline."""

    value: float
    n: int


@dataclass(frozen=True)
class Ratio:
    """Ratio of a quantity to the baseline's, as `correct` tested it."""

    value: float
    low: float | None
    """Of the interval of `1 - level`; None with too few repeats."""
    high: float | None
    n: int
    """Runs, or pairs of runs, of the smaller side."""
    decision: Significance
    """What the interval says: `higher` and `lower` exclude 1."""
    p: float | None = None
    """P-value of equality, uncorrected."""
    level: float = ALPHA
    """At which Holm's method tested it, and 1 - coverage of the interval."""


Sample = Mapping[Hashable, float]
"""Repeat -> measured value; positive where ratios are made of it."""

K = TypeVar("K", bound=Hashable)


class Error(ABC):
    """Distribution of the error of a mean difference."""

    @property
    @abstractmethod
    def spread(self) -> float:
        """Standard deviation of the difference in one repeat, as is typical."""

    @property
    def rms(self) -> float:
        """The same by the mean variance: larger where the configuration may be a noisy one."""
        return self.spread

    @abstractmethod
    def beyond(self, distance: float) -> float:
        """Chance that the mean differs by this distance or more, to either side, by noise alone."""

    @abstractmethod
    def half(self, level: float) -> float:
        """Half of the interval: the distance with `beyond(distance) == level`."""


@dataclass(frozen=True)
class Difference:
    """Mean difference from the baseline: of logarithms, or in a metric's unit; not yet corrected.

    The questions of a single comparison at a level that the caller has from `holm_levels`.
    """

    mean: float
    n: int
    """Runs, or pairs of runs, of the smaller side."""
    error: Error | None = None
    """None with too few repeats."""

    @cached_property
    def p(self) -> float | None:
        """Two-sided p-value of no difference; None with too few repeats."""
        return None if self.error is None else self.error.beyond(self.mean)

    @property
    def is_exact(self) -> bool:
        """Whether the repeats never vary, as bytes: nothing is to be tested."""
        return self.error is not None and self.error.spread == 0.0

    def interval(self, level: float = ALPHA) -> tuple[float, float] | None:
        """Ends of the interval of `1 - level`; None with too few repeats."""
        if self.error is None:
            return None
        half = self.error.half(level)
        return self.mean - half, self.mean + half

    def p_same(self, margin: float) -> float | None:
        """P-value of two one-sided tests (Schuirmann 1987) of a difference beyond +-`margin`.

        The two are the same within the margin at a level that is not below it. `margin` is in the
        unit of `mean`: log(1.05) for 5 %.
        """
        if self.error is None:
            return None
        room = margin - abs(self.mean)
        half = 0.5 * self.error.beyond(room)
        return half if room > 0 else 1 - half

    def repeats_needed(self, level: float, same: float | None = None) -> float | None:
        """Repeats in all after which a direction would be shown in 4 of 5 cases.

        With `same`, a margin as of `p_same`, or after which sameness would be, if that is sooner;
        for a difference as large as this mean, with its noise. `level` is that of this row's test.
        Infinite for a mean of 0 without `same`; None with too few repeats.
        """
        if self.error is None:
            return None
        far = abs(self.mean) if same is None else max(abs(self.mean), same - abs(self.mean))
        return repeats_to_show(far, self.error.rms, level, power=0.8)


def repeats_to_show(distance: float, spread: float, level: float, power: float = 0.9) -> float:
    """Repeats (or seeds), at least MIN_REPEATS, that show a difference with chance `power`.

    The normal rule n = (z(level / 2) + z(power))^2 (spread / distance)^2, where `spread` is the
    standard deviation of one repeat's difference: sqrt(2) times the noise of one run. `level` is
    that of one test: of Holm's first step for the smallest number that is sure to suffice.
    """
    if distance <= 0:
        return math.inf
    quantiles = -NormalDist().inv_cdf(level / 2) + NormalDist().inv_cdf(power)
    return max(float(MIN_REPEATS), (quantiles * spread / distance) ** 2)


def holm_levels(differences: Mapping[K, Difference], level: float = ALPHA) -> dict[K, float]:
    """The level at which Holm's method tests each difference of one family.

    The k-th smallest p-value of m is tested at level / (m - k + 1) while all before were resolved;
    the others at level / (m - number resolved). A difference is resolved if its p is at most its
    level. Exact ones and those with too few repeats are not tested and do not count in m.

    Args:
        differences: all comparisons with one baseline in one measure.
        level: chance of a false claim among them; 0.05, or less where one looks several times: a
            sweep with `sweep.repeats=auto` has a level for each look.
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
    """Ratios of several comparisons with one baseline, with the intervals at which Holm tested."""
    levels = holm_levels(differences, level)
    return {key: ratio_of(each, levels[key]) for key, each in differences.items()}


def correct_all(
    differences: Sequence[Mapping[str, Difference]], level: float = ALPHA
) -> list[dict[str, Ratio]]:
    """Correct measure -> difference of several comparisons, each measure by itself."""
    decided = {
        key: correct({n: each[key] for n, each in enumerate(differences) if key in each}, level)
        for key in dict.fromkeys(key for each in differences for key in each)
    }
    return [{key: decided[key][n] for key in each} for n, each in enumerate(differences)]


def ratio_of(difference: Difference, level: float = ALPHA) -> Ratio:
    """The ratio of a difference of logarithms, as tested at this level."""
    value, n, ends = math.exp(difference.mean), difference.n, difference.interval(level)
    if ends is None:
        return Ratio(value, None, None, n, Significance.single, level=level)
    low, high = map(math.exp, ends)
    return Ratio(value, low, high, n, _decision(low, high), difference.p, level)


def _decision(low: float, high: float) -> Significance:
    if low >= 1 - SAME and high <= 1 + SAME:
        return Significance.same
    if low > 1:
        return Significance.higher
    return Significance.lower if high < 1 else Significance.unresolved


def estimate(sample: Sample) -> Estimate | None:
    """Geometric mean; None without values."""
    if not sample:
        return None
    return Estimate(math.exp(fmean(map(math.log, sample.values()))), len(sample))


def mean_of(values: Collection[float]) -> Estimate | None:
    """Arithmetic mean, of what may be 0 or negative; None without values."""
    return Estimate(fmean(values), len(values)) if values else None


def mean_difference(differences: Collection[float], floor: float = 0.0) -> Difference:
    """Mean of differences of runs that belong together, with Student's t.

    Args:
        differences: one of each pair.
        floor: least variance of one difference: that of rounding.
    """
    mean, n = fmean(differences), len(differences)
    if n < MIN_REPEATS:
        return Difference(mean, n)
    found = max(variance(differences), floor)
    return Difference(mean, n, _Student(found if found > TINY else 0.0, n, n - 1))


def variance(values: Collection[float]) -> float:
    """Unbiased variance in floats, ten times as fast as the standard library's."""
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


@dataclass(frozen=True)
class _Student(Error):
    """Student's t, of a mean of `n` differences with this variance."""

    variance: float
    n: float
    freedom: float

    @property
    def spread(self) -> float:
        return math.sqrt(self.variance)

    def beyond(self, distance: float) -> float:
        from scipy.special import stdtr  # here: 0.1 s that `eke --help` does without

        if not self.variance:
            return float(distance == 0.0)
        return float(2 * stdtr(self.freedom, -abs(distance) / self.spread * math.sqrt(self.n)))

    def half(self, level: float) -> float:
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, 1 - level / 2)) * self.spread / math.sqrt(self.n)


def difference_of(base: Sample, other: Sample, floor: float = 0.0) -> Difference:
    """The second sample's mean less the first's, by their own noise; neither is empty.

    Paired, or by Welch's t with Welch-Satterthwaite's degrees of freedom where fewer than three
    repeats are common. `floor` is as of `mean_difference`.
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
    parts = [max(variance(each), floor / 2) / len(each) for each in sides]
    weights = [part**2 / (len(each) - 1) for part, each in zip(parts, sides, strict=True)]
    total = sum(parts)
    freedom = total**2 / sum(weights) if total else n - 1
    return Difference(mean, n, _Student(total * n, n, freedom))


Array = NDArray[Any]

MIN_ROWS = 4
"""With fewer there is nothing to fit a prior to: each comparison stands by itself."""

STEP = 0.5
GRID = np.arange(-6.0, 14.1, STEP)
"""Logarithms of variances, over the median one."""

VARIANCES = np.exp(GRID)

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

NEWTON_STEPS, NEAR_ENOUGH = 20, 1e-5
"""Of an interval's half: at most so many, until one is this part of it; the last is far smaller."""

ROUNDS = 4
"""Of what repeats share and how much each configuration says about it."""


class Noise:
    """Posterior of the noise of some configurations: likelihoods and probabilities of priors.

    From logarithms, (..., repeats, configurations), NaN where one is missing; two or more each.
    `floor` is added to each variance: that of rounding.
    """

    def __init__(self, logs: Array, floor: float = 0.0) -> None:
        rest = logs - np.nanmean(logs, axis=-2, keepdims=True)
        self._prior, self._centers, chance = _priors(logs.shape[-1])
        apart = np.nansum((rest - np.nanmedian(rest, axis=-1, keepdims=True)) ** 2, axis=-2)
        weight = 1 / np.maximum(apart + np.median(apart, axis=-1, keepdims=True), TINY)
        for _ in range(ROUNDS):
            rest, squares, freedom = _residual(rest, weight)
            squares += floor * freedom
            own = squares / freedom
            least = np.maximum(own.max(-1) * math.exp(2 - GRID[-1]), TINY)  # all are on the grid
            self.scale = np.maximum(np.median(own, axis=-1), least)[..., None]
            relative = (squares / self.scale)[..., None]
            like = -0.5 * (freedom[..., None] * GRID + relative / VARIANCES)
            self._like = np.exp(like - like.max(-1, keepdims=True))
            evidence = np.maximum(self._like @ self._prior.T, 1e-250)
            told = np.log(evidence).sum(-2) + np.log(chance)
            self._chance = np.exp(told - told.max(-1, keepdims=True))
            self._chance /= self._chance.sum(-1, keepdims=True)
            self._over = 1 / evidence
            found = self._like * ((self._chance[..., None, :] * self._over) @ self._prior)
            weight = found @ (1 / VARIANCES)

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

    errors = np.sqrt(2 * VARIANCES * scale / n)
    chance: Array = (sums * erfc(np.abs(distance)[..., None] / errors)).sum(-1)
    return chance


@dataclass(frozen=True, eq=False)
class _Moderated(Error):
    """Error of the mean over `n` repeats and `pairs` pairs, by the noise of all configurations."""

    sums: Array
    """Chances of GRID's values for the sum of the variances, as of `Noise.sums`."""
    scale: Array
    n: int
    pairs: int = 1

    @property
    def spread(self) -> float:
        # By the mean of the logarithms: a small chance of much noise is not typical.
        found = math.exp(float((self.sums * GRID).sum())) * self.scale.item()
        return math.sqrt(found) / self.pairs

    @property
    def rms(self) -> float:
        found = float((self.sums * VARIANCES).sum() * self.scale.item())
        return math.sqrt(found) / self.pairs

    def beyond(self, distance: float) -> float:
        n = self.n * self.pairs**2
        return float(chance_beyond(np.array(distance), self.sums, self.scale, n))

    def half(self, level: float) -> float:
        errors = np.sqrt(2 * VARIANCES * self.scale / self.n) / self.pairs
        # One of GRID's variances alone would have one of these; the chance falls and is convex, so
        # Newton's method from the last one that is too near never goes too far.
        near = -NormalDist().inv_cdf(level / 2) * errors / math.sqrt(2)
        beyond = chance_beyond(near, self.sums, self.scale, self.n * self.pairs**2)
        half = float(near[max(int((beyond > level).sum()) - 1, 0)])
        for _ in range(NEWTON_STEPS):
            slope = float((self.sums * np.exp(-((half / errors) ** 2)) / errors).sum())
            step = (self.beyond(half) - level) * math.sqrt(math.pi) / 2 / slope
            half += step
            if step < NEAR_ENOUGH * half:
                break
        return half


class Compared:
    """Comparisons of one machine's configurations in one measure, with the noise of all of them.

    Args:
        samples: of each configuration; all are positive if `is_log`.
        is_log: compare logarithms, else the values.
        floor: least variance of one value, in the square of its unit: that of rounding.
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
        """Whether a configuration is noisier than the others."""
        noise, place = self._noise, self._place.get(key)
        return noise is not None and place is not None and bool(noise.is_noisy(place))

    def difference(self, *pairs: tuple[Hashable, Hashable]) -> Difference | None:
        """The second less the first, the mean of all pairs; None if nothing is there.

        Of logarithms, where the comparison is of ratios; to be tested by `correct`.
        """
        sides = [(self._samples[a], self._samples[b]) for a, b in pairs]
        sides = [(first, second) for first, second in sides if first and second]
        shared = [[r for r in first if r in second] for first, second in sides]
        n = min(map(len, shared), default=0)
        members = [key for pair in pairs for key in pair]
        if n < MIN_REPEATS or self._noise is None or not all(k in self._place for k in members):
            return self._alone(sides)
        means = [
            fmean([b[r] - a[r] for r in each]) for (a, b), each in zip(sides, shared, strict=True)
        ]
        sums = self._noise.sums([self._place[k] for k in members])
        return Difference(fmean(means), n, _Moderated(sums, self._noise.scale, n, len(pairs)))

    def _alone(self, sides: Sequence[tuple[Sample, Sample]]) -> Difference | None:
        """The mean over pairs of samples by their own noise."""
        if len(sides) < 2:
            return difference_of(*sides[0], 2 * self._floor) if sides else None
        both = [r for r in sides[0][0] if all(r in each for side in sides for each in side)]
        if len(both) < MIN_REPEATS:
            return mean_difference([difference_of(a, b).mean for a, b in sides])
        floor = 2 * self._floor / len(sides)
        return mean_difference([fmean([b[r] - a[r] for a, b in sides]) for r in both], floor)


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
    sums = VARIANCES[:, None] + VARIANCES
    low = np.clip(np.searchsorted(GRID, np.log(sums), "right") - 1, 0, len(GRID) - 2)
    below, above = VARIANCES[low], VARIANCES[low + 1]
    upper = np.clip((sums - below) / (above - below), 0.0, 1.0).ravel()
    added = np.zeros((sums.size, len(GRID)))
    places = np.arange(sums.size)
    added[places, low.ravel()] = 1 - upper
    added[places, low.ravel() + 1] = upper
    return added
