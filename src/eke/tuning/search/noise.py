"""Several trials of one configuration: what a step takes, and whether they agree.

What disturbs a trial (another user's process, a page cache gone cold) is no normal error: one trial
in a few is off by any factor. So medians, here as for the steps within a trial.
"""

import statistics
from collections.abc import Sequence

UNSTEADY = 0.1
"""Standard deviation between trials of one configuration from which on one of them must have been
disturbed: of two, one took about 15 % longer."""

MOST = 4
"""Trials of one configuration at most: on a machine that is never quiet, more tell no more."""

OF_MAD = 1.4826
"""A normal distribution's standard deviation over the median distance from its median."""

OF_FEW = {3: 1.495, 4: 1.363}
"""Correction of that for few values (Croux and Rousseeuw 1992, "Time-efficient algorithms for two
highly robust estimators of scale"; by simulation the same to 1 %)."""


def typical(logarithms: Sequence[float]) -> float:
    """Of the step times of one configuration's trials: their median, of two the mean."""
    return statistics.median(logarithms)


def deviation(logarithms: Sequence[float]) -> float:
    """Standard deviation from trial to trial; of three or more, one that is far off hardly counts.

    0 for a single trial, which says nothing of it.
    """
    if len(logarithms) < 3:
        return statistics.stdev(logarithms) if len(logarithms) == 2 else 0.0
    middle = typical(logarithms)
    distance = statistics.median(abs(each - middle) for each in logarithms)
    return OF_MAD * OF_FEW.get(len(logarithms), 1.0) * distance


def deviation_between(groups: Sequence[Sequence[float]]) -> float:
    """The same, pooled over configurations; 0 where none was tried twice."""
    repeated = [group for group in groups if len(group) > 1]
    if not repeated:
        return 0.0
    squares = sum(deviation(group) ** 2 * (len(group) - 1) for group in repeated)
    return float((squares / sum(len(group) - 1 for group in repeated)) ** 0.5)
