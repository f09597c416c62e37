"""Numeric limits of configuration fields, kept as data in `field(metadata=...)`."""

import math
from dataclasses import dataclass

LARGEST = 2**53
"""Above any quantity there is, and the last whole number up to which a float counts every one."""


@dataclass(frozen=True)
class Limit:
    """An interval of finite numbers; a bound that is None is open."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False

    def admits(self, value: float) -> bool:
        """Whether `value` lies inside; infinity and not-a-number never do."""
        if abs(value) > LARGEST or not math.isfinite(value):
            return False
        if self.low is not None and (value <= self.low if self.low_open else value < self.low):
            return False
        if self.high is None:
            return True
        return value < self.high if self.high_open else value <= self.high

    def describe(self, value: float) -> str:
        """What is wanted instead of `value`, for an error message."""
        if self.high is not None:
            low, high = _number(self.low or 0), _number(self.high)
            if self.low_open:
                return f"above {low} and below {high}"
            form = "at least {} and below {}" if self.high_open else "between {} and {}"
            return form.format(low, high)
        if value > LARGEST:
            return f"at most {_number(LARGEST)}"
        return f"{'above' if self.low_open else 'at least'} {_number(self.low or 0)}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def above(low: float) -> dict[str, Limit]:
    """The value must be greater than `low`."""
    return {"limit": Limit(low=low, low_open=True)}


def at_least(low: float) -> dict[str, Limit]:
    """The value must be `low` or more."""
    return {"limit": Limit(low=low)}


def between(low: float, high: float) -> dict[str, Limit]:
    """The value must lie in the closed interval."""
    return {"limit": Limit(low=low, high=high)}


def below(low: float, high: float) -> dict[str, Limit]:
    """The value must be `low` or more, and less than `high`."""
    return {"limit": Limit(low=low, high=high, high_open=True)}


def inside(low: float, high: float) -> dict[str, Limit]:
    """The value must lie in the open interval."""
    return {"limit": Limit(low=low, high=high, low_open=True, high_open=True)}
