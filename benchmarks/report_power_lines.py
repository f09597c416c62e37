"""Lines of the table of benchmarks/report_power.py."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Line:
    """One simulated share and its bound."""

    row: str
    """Name of the function."""
    what: str
    """The share, in words: a row of the page's table."""
    setting: str
    value: float
    bound: float
    is_least: bool = False
    """Whether the bound is a lower one."""
    unit: str = "%"
    """Of value and bound; empty for a number."""
    sweeps: int = 0
    """Simulated sweeps (pairs of sides for `eke compare`)."""

    @property
    def is_right(self) -> bool:
        """Whether the bound holds."""
        return self.value >= self.bound if self.is_least else self.value <= self.bound


Random = np.random.Generator
Array = np.ndarray


def percent(count: float, of: float) -> float:
    """A share in per cent."""
    return 100 * count / of if of else math.nan
