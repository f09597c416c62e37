"""What a search chooses from, and what a trial found."""

from collections.abc import Sequence
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
    """Seconds per optimizer step by the time model, compiling left out; None where it says
    nothing."""
    usual: float = 1.0
    """Time of a step over that of what was typed, as published for its techniques: what is gone by
    where the time model says nothing of a point."""
    compiling_s: float = 0.0
    """Seconds that compiling is expected to add to each optimizer step: once, over all of a run's
    steps."""
    needless_beside: tuple[tuple[str, ...], ...] = ()
    """Values of points that do the same with less work: where one of them has room with the same
    micro-batch, this one can only be slower."""


@dataclass(frozen=True)
class Trial:
    """What became of one point."""

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
    """For each point, the numbers of those it is needless beside."""
    at = {(point.values, point.micro_batch, point.devices): n for n, point in enumerate(points)}
    keys = [
        [(values, point.micro_batch, point.devices) for values in point.needless_beside]
        for point in points
    ]
    return [[at[key] for key in each if key in at] for each in keys]
