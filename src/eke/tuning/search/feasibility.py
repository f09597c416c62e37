"""Which points are worth a trial at all: there is room, some need, and they do not fail."""

import math
from collections.abc import Sequence

import numpy as np

from eke.tuning.search.objective import Objective
from eke.tuning.search.search_space import Point, Room, Trial
from eke.tuning.search.surrogate import Array

RISK = 0.5
"""What the improvement of a tight configuration counts: it may run out of memory instead."""


def chances(
    points: Sequence[Point],
    with_less_work: Sequence[Sequence[int]],
    trials: Sequence[tuple[int, Trial]],
    objective: Objective,
) -> Array:
    """For each point, the chance that a trial of it tells something.

    Args:
        points: all there are.
        with_less_work: for each, the numbers of those that do the same with less work.
        trials: number of a point and what was found of it.
        objective: what counts; where that is memory, nothing that saves it is needless.
    """
    failed = {number for number, trial in trials if trial.step_s is None}
    ran_out = any(trial.ran_out for _, trial in trials)
    stands = [p.room is Room.fits and number not in failed for number, p in enumerate(points)]
    suspects = _suspects(points, trials)

    def chance(number: int) -> float:
        point = points[number]
        needless = any(stands[other] for other in with_less_work[number])
        if point.room is Room.none or (needless and objective is not Objective.memory):
            return 0.0
        if point.room is Room.tight and ran_out:
            return 0.0
        mine = set(enumerate(point.values))
        innocent = math.prod(1 - len(each & mine) / len(each) for each in suspects)
        return innocent if point.room is Room.fits else RISK * innocent

    return np.array([chance(number) for number in range(len(points))])


def _suspects(
    points: Sequence[Point], trials: Sequence[tuple[int, Trial]]
) -> list[set[tuple[int, str]]]:
    """For each trial that failed, the values that worked nowhere: one of them is the reason.

    A failure without any is that of its combination, and of that alone.
    """
    values = [(set(enumerate(points[number].values)), trial) for number, trial in trials]
    worked = {each for own, trial in values if trial.step_s is not None for each in own}
    failures = [own for own, trial in values if trial.step_s is None and not trial.ran_out]
    return [own - worked for own in failures if own - worked]
