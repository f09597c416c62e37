"""Corrections of forecasts from finished runs: of this device, with these versions, by this method.

A pair is what was predicted and what was measured of one configuration. Of a group of pairs the
median of the logarithms of measured over predicted corrects the expected value, where it differs
from zero by more than chance; an interval for one more run says how far off that may be. The low
end, which refuses, is never moved (docs/design/forecast.md).
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from eke.estimate.memory.values import Calibrated, Forecast, Range

NEEDED = 5
"""Configurations of a group before anything is said: all five on one side of the truth happen in
6 % of cases (2 * 0.5^5), four in 12 %, and Student's interval widens quickly below."""

CONFIDENCE = 0.95

LARGEST_RATIO = 64.0
"""A pair further off than this is not a forecast's error but a broken file."""


@dataclass(frozen=True)
class Pair:
    """One finished run; bytes of the same quantity."""

    key: str
    """Of its plan (`eke.estimate.memory.cache.key_of`): one configuration is one observation."""
    run_id: str
    predicted: int
    """As forecast, never as corrected: corrections do not feed on themselves."""
    measured: int

    @property
    def log_ratio(self) -> float:
        """Natural logarithm of measured over predicted: 0 where the forecast was right."""
        return math.log(self.measured / self.predicted)

    @property
    def is_sane(self) -> bool:
        """Whether it can be what it says."""
        if not (self.key and self.run_id and self.predicted > 0 and self.measured > 0):
            return False
        return 1 / LARGEST_RATIO < self.measured / self.predicted < LARGEST_RATIO


@dataclass(frozen=True)
class Fit:
    """What a group of pairs says of the next run."""

    num_runs: int
    """Different configurations."""
    factor: float
    """Measured over predicted, as it is to be expected; 1 where no bias is seen."""
    within: float
    """Half the width of the interval, as a natural logarithm: about a relative error."""


def one_of_each(pairs: Iterable[Pair]) -> list[Pair]:
    """The newest pair of each configuration, in their order."""
    return list({pair.key: pair for pair in pairs if pair.is_sane}.values())


def fit(pairs: Iterable[Pair]) -> Fit | None:
    """The correction of a group, and how sure it is; None where there are too few.

    The interval is Student's for one more observation: t(n - 1) * s * sqrt(1 + 1/n), with s about
    the centre that is used (Hahn & Meeker 1991, Statistical Intervals, section 4.7). Errors of
    forecasts have heavier tails than the normal distribution, so it is never narrower than the
    largest deviation that was seen.

    Args:
        pairs: of one group, the newest last.
    """
    ratios = [pair.log_ratio for pair in one_of_each(pairs)]
    count = len(ratios)
    if count < NEEDED:
        return None
    centre = statistics.median(ratios)
    low, high = median_interval(ratios)
    if low <= 0 <= high:  # chance would do
        centre = 0.0
    deviations = [ratio - centre for ratio in ratios]
    spread = math.sqrt(sum(d * d for d in deviations) / (count - 1))
    student = t_quantile((1 + CONFIDENCE) / 2, count - 1) * spread * math.sqrt(1 + 1 / count)
    return Fit(count, math.exp(centre), max(student, *(abs(d) for d in deviations)))


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


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's distribution."""
    from scipy.special import stdtrit  # here: 0.1 s, and only where there are runs enough

    return float(stdtrit(degrees, probability))


def corrected(found: Range, fitted: Fit) -> Range:
    """A range with its expected value corrected and its high end where the interval ends.

    The low end stays: what no correct implementation can do without is no matter of experience.
    """
    expected = max(found.low, round(found.expected * fitted.factor))
    return Range(found.low, expected, max(expected, math.ceil(expected * math.exp(fitted.within))))


def calibrate(found: Forecast, pairs: Sequence[Pair], versions: str) -> Forecast:
    """A forecast with what the pairs of its group add to it; its own numbers stay what they are.

    Args:
        found: by formulas or traces.
        pairs: of its group.
        versions: of what they ran with, in words.
    """
    fitted = fit(pairs)
    if fitted is None:
        few = len(one_of_each(pairs))
        return replace(found, calibrated=Calibrated(None, None, few, NEEDED, 1.0, 0.0, versions))
    return replace(
        found,
        calibrated=Calibrated(
            peak=corrected(found.peak, fitted),
            allocated=corrected(found.allocated, fitted),
            num_runs=fitted.num_runs,
            needed=NEEDED,
            factor=fitted.factor,
            within=math.expm1(fitted.within),
            versions=versions,
        ),
    )
