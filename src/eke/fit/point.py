"""What a search chooses from, and what a trial found."""

from dataclasses import dataclass
from enum import Enum


class Room(Enum):
    """Whether a configuration fits into memory, as far as that is known without running it."""

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
    room: Room = Room.fits
    peak_bytes: int | None = None
    """Expected peak on one device; None where nobody knows."""
    expected_s: float | None = None
    """Seconds per optimizer step by the time model; None where it says nothing."""
    usual: float = 1.0
    """Time of a step over that of what was typed, as published for its techniques: what is gone by
    where the time model says nothing of one of the points."""


@dataclass(frozen=True)
class Trial:
    """What became of one point."""

    step_s: float | None
    """Seconds per optimizer step, the median after warm-up; None where it did not get there."""
    spread: float = 0.0
    """Standard error of the logarithm of `step_s`."""
    peak_bytes: int | None = None
    """Measured; comparable with the points' own."""
    ran_out: bool = False
    """Of memory."""
