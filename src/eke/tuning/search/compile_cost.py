"""What is paid once: seconds of compiling, spread over the steps of a run.

Kept apart from the rest of a step, since techniques multiply that and add this.
"""

import math
from collections.abc import Sequence

import numpy as np

from eke.tuning.search.search_space import Point, Trial
from eke.tuning.search.surrogate import Array

UNSEEN, SEEN = 0.7, 0.4
"""Standard deviations of the logarithm of what compiling takes, before any trial that compiled and
after: a factor of two, and half as much again (an assumption; caches and cores differ)."""


def shares(points: Sequence[Point], trials: Sequence[tuple[int, Trial]]) -> tuple[Array, Array]:
    """Seconds per step that compiling adds to each point, and the deviation of their logarithm.

    Args:
        points: all there are.
        trials: number of a point and what was found of it; whatever their estimates were off by,
            those of the others are taken to be off by, too.
    """
    ended = [(number, trial) for number, trial in trials if trial.step_s is not None]
    off = [
        math.log(trial.compiling_s / points[number].compiling_s)
        for number, trial in ended
        if trial.compiling_s and points[number].compiling_s
    ]
    factor = math.exp(sum(off) / len(off)) if off else 1.0
    expected: Array = factor * np.array([point.compiling_s for point in points])
    doubt = np.full(len(points), SEEN if off else UNSEEN)
    for number in {number for number, _ in ended}:
        own = [trial.compiling_s for n, trial in ended if n == number]
        expected[number], doubt[number] = sum(own) / len(own), 0.0
    return expected, doubt
