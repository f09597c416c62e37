"""Search space: candidate points and trial results.

Objective: the value that `--objective` minimises, as a logarithm, so that differences are ratios.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FitsMemory(Enum):
    """Whether a configuration fits into memory, by forecast."""

    fits = "fits"
    tight = "tight"
    """The expected peak has room, the high one has not."""
    none = "none"


@dataclass(frozen=True)
class Point:
    """One configuration as the search sees it."""

    values: tuple[str, ...]
    """Its value on each axis, the same axes for all points."""
    micro_batch: int
    """Samples per device and forward pass."""
    devices: int = 1
    room: FitsMemory = FitsMemory.fits
    peak_bytes: int | None = None
    """Expected peak on one device; None if unknown."""
    expected_s: float | None = None
    """Seconds per optimizer step by the time model, without compiling; None if unknown."""
    usual: float = 1.0
    """Step time relative to the baseline, as published for its techniques; used where the time
    model has no answer."""
    compiling_s: float = 0.0
    """Seconds that compiling is expected to add to each optimizer step: once, over all of a run's
    steps."""
    needless_beside: tuple[tuple[str, ...], ...] = ()
    """Values of points that do the same with less work: where one of them has room with the same
    micro-batch, this one can only be slower."""


@dataclass(frozen=True)
class Trial:
    """Result of one point."""

    step_s: float | None
    """Seconds per optimizer step, the median after warm-up, with its share of compiling; None where
    it did not get there."""
    spread: float = 0.0
    """Standard error of the logarithm of `step_s`."""
    compiling_s: float = 0.0
    """Of `step_s`: its share of compiling."""
    peak_bytes: int | None = None
    """Measured; comparable with the points' own."""
    ran_out: bool = False
    """Of memory."""


def with_less_work(points: Sequence[Point]) -> list[list[int]]:
    """For each point, the indices of points that make it redundant."""
    at = {(point.values, point.micro_batch, point.devices): n for n, point in enumerate(points)}
    keys = [
        [(values, point.micro_batch, point.devices) for values in point.needless_beside]
        for point in points
    ]
    return [[at[key] for key in each if key in at] for each in keys]


SPEED_IN_MEMORY = 0.05
"""Weight of time relative to memory: a step twice as long has to save 3.5 % of the peak. Without it
the search would give any amount of time for the last megabyte."""


class Objective(Enum):
    """Quantity that the best configuration minimises."""

    speed = "speed"
    """Seconds per sample."""
    memory = "memory"
    """Peak memory of a device; among much the same, seconds per sample."""
    cost = "cost"
    """Device-seconds per sample."""

    def score(self, log_step_s: float, peak_bytes: float | None, devices: int) -> float:
        """The logarithm of what is minimised.

        Args:
            log_step_s: natural logarithm of the seconds per optimizer step; all configurations
                have the same samples per step.
            peak_bytes: of one device; needed for `memory` alone.
            devices: that the configuration uses.
        """
        if self is Objective.memory:
            assert peak_bytes, "no search for memory without its forecast"
            return math.log(peak_bytes) + SPEED_IN_MEMORY * log_step_s
        if self is Objective.cost:
            return log_step_s + math.log(devices)
        return log_step_s

    @property
    def weight(self) -> float:
        """How much of an error of the logarithmic time is one of the score."""
        return SPEED_IN_MEMORY if self is Objective.memory else 1.0
