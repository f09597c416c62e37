"""Comparing loops on a machine that is never quiet: rounds in which each takes its turn.

Noise that lasts longer than a round hits all of a round's turns alike, so only differences within a
round are read, and of those the median. CPU time stands beside wall time: it does not count waiting
for a core, but a neighbour on the same core or cache slows it down too.
"""

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles

RESAMPLES = 2000
"""Enough for two digits of a 95 % interval (Efron & Tibshirani 1993, chapter 13)."""


@dataclass
class Turns:
    """Milliseconds per step of one loop, one entry per round."""

    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def of(self, clock: str) -> list[float]:
        """The entries of `wall` or `cpu`."""
        return self.wall_ms if clock == "wall" else self.cpu_ms


@dataclass(frozen=True)
class Start:
    """When a turn began, on both clocks (seconds)."""

    wall: float
    cpu: float

    @staticmethod
    def now() -> "Start":
        """This moment."""
        return Start(time.perf_counter(), time.process_time())

    def end(self, turns: Turns, num_steps: int) -> None:
        """The turn is over after `num_steps` steps."""
        turns.wall_ms.append((time.perf_counter() - self.wall) / num_steps * 1e3)
        turns.cpu_ms.append((time.process_time() - self.cpu) / num_steps * 1e3)


@dataclass(frozen=True)
class Summary:
    """Median of some numbers, their spread, and how well the median is known."""

    median: float
    p10: float
    p90: float
    low: float
    """Lower end of the 95 % bootstrap interval of the median."""
    high: float
    n: int

    def as_dict(self) -> dict[str, float]:
        """Rounded to a tenth of a microsecond, when the unit is milliseconds."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def summarize(values: list[float], seed: int = 0) -> Summary:
    """Summary of at least two values."""
    deciles = quantiles(values, n=10, method="inclusive")
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = RESAMPLES * 25 // 1000
    return Summary(
        median(values), deciles[0], deciles[-1], medians[tail], medians[-tail - 1], len(values)
    )


def difference(turns: Turns, reference: Turns, clock: str) -> Summary:
    """What one loop takes longer than another, round by round (milliseconds per step)."""
    pairs = zip(turns.of(clock), reference.of(clock), strict=True)
    return summarize([mine - other for mine, other in pairs])


def ratio(turns: Turns, reference: Turns, clock: str) -> Summary:
    """How many times as long one loop takes as another, round by round."""
    pairs = zip(turns.of(clock), reference.of(clock), strict=True)
    return summarize([mine / other for mine, other in pairs])


Turn = tuple[Callable[[int], None], Turns]
"""Advances a loop by a number of steps; and where its times go."""


def play_round(loops: Iterable[Turn], num_steps: int, num_warmup: int) -> None:
    """One turn of each loop; its first steps refill the caches and are not timed."""
    for advance, turns in loops:
        advance(num_warmup)
        start = Start.now()
        advance(num_steps)
        start.end(turns, num_steps)
