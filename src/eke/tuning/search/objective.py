"""What `--objective` minimises, as a logarithm, so that differences are ratios."""

import math
from enum import Enum

SPEED_IN_MEMORY = 0.05
"""Weight of time beside memory: a step twice as long has to save 3.5 % of the peak. Without it the
search would give any amount of time for the last megabyte."""


class Objective(Enum):
    """What the best configuration has least of."""

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
