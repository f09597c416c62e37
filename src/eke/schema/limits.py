"""Numeric limits of configuration fields, kept as data in `field(metadata=...)`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """An interval; a bound that is None is open."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False

    def admits(self, value: float) -> bool:
        """Whether `value` lies inside; not-a-number never does."""
        if value != value:
            return False
        if self.low is not None and (value <= self.low if self.low_open else value < self.low):
            return False
        return self.high is None or value <= self.high

    def describe(self) -> str:
        """The interval in words, for an error message."""
        if self.high is not None:
            return f"between {self.low:g} and {self.high:g}"
        return f"above {self.low:g}" if self.low_open else f"at least {self.low:g}"


def above(low: float) -> dict[str, Limit]:
    """The value must be greater than `low`."""
    return {"limit": Limit(low=low, low_open=True)}


def at_least(low: float) -> dict[str, Limit]:
    """The value must be `low` or more."""
    return {"limit": Limit(low=low)}


def between(low: float, high: float) -> dict[str, Limit]:
    """The value must lie in the closed interval."""
    return {"limit": Limit(low=low, high=high)}
