"""Made-up machines: the step time and the peak of every configuration, from rules of their own.

Nothing here is the time model's: a machine has a time per kernel launch, a rate that rises with the
micro-batch, a cache that large micro-batches fall out of, techniques that work better or worse than
usual, and pairs of techniques that do not multiply.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np

from eke.estimate.memory import Verdict
from eke.tuning.search.search import Search
from eke.tuning.search.search_space import Objective, Point, Trial

AXES = (
    ("attention=sdpa", "attention=flash2"),
    ("compile=none", "compile=inductor", "compile=regional", "compile=reduce_overhead"),
    ("kernels=none", "kernels=fused", "kernels=liger"),
    ("memory=none", "memory=checkpointing", "memory=checkpointing_selective"),
    ("precision=fp32", "precision=bf16"),
)

USUAL = {"compile=inductor": 0.87, "compile=regional": 0.87, "compile=reduce_overhead": 0.87,
         "memory=checkpointing": 1.33, "memory=checkpointing_selective": 1.07,
         "precision=bf16": 0.5}  # fmt: skip
"""What is published of techniques: right in its direction, of no machine in particular."""

KEEP_ALL = "memory=none"
"""What recomputing is needless beside."""

OFF = 1.05
"""How far off the exhaustive best a search may end."""


@dataclass(frozen=True)
class Surface:
    """A machine and a model."""

    points: list[Point]
    step_s: list[float]
    """The truth, for each point."""
    runs_out: list[bool]
    typed: int | None
    """Number of the point that a user would begin with."""

    @property
    def best_s(self) -> float:
        """The fastest that fits."""
        return min(s for s, out in zip(self.step_s, self.runs_out, strict=True) if not out)


@dataclass(frozen=True)
class Found:
    """How a search ended."""

    off: float
    """Step time of its choice over that of the exhaustive best."""
    num_trials: int
    num_out_of_memory: int


def make(seed: int, estimated: bool, error: float = 1.0) -> Surface:
    """A random machine.

    Args:
        seed: of everything about it.
        estimated: whether there is a time model; its errors are random as well.
        error: scale of its errors; at 1 a technique's effect is off by 12 %, the machine by 40 %.
    """
    rng = np.random.default_rng(seed)
    target = int(rng.choice([16, 32, 64, 128]))
    launch_s, sample_s = rng.uniform(0.002, 0.04), rng.uniform(0.0005, 0.02)
    half_rate, cache = rng.uniform(0.2, 4), rng.uniform(8, 200)
    launches = {"compile=none": 1.0, "compile=inductor": rng.uniform(0.4, 0.8),
                "compile=regional": rng.uniform(0.5, 0.9),
                "compile=reduce_overhead": rng.uniform(0.05, 0.3)}  # fmt: skip
    work = {value: math.exp(rng.normal(-0.08, 0.15)) for axis in AXES for value in axis[1:]}
    work |= {axis[0]: 1.0 for axis in AXES}
    work["memory=checkpointing"] = rng.uniform(1.2, 1.45)
    work["memory=checkpointing_selective"] = rng.uniform(1.02, 1.15)
    work["precision=bf16"] = rng.uniform(0.3, 0.9)
    kept = {"memory=checkpointing": rng.uniform(0.15, 0.4),
            "memory=checkpointing_selective": rng.uniform(0.5, 0.8)}  # fmt: skip
    room = rng.uniform(2, 1.5 * target)
    misjudged = {value: rng.normal(0, 0.12 * error) for axis in AXES for value in axis}
    scale = rng.normal(0, 0.4 * error)
    points, step_s, runs_out = [], [], []
    for values in itertools.product(*AXES):
        odd = rng.normal(0, 0.03)
        for size in (2**n for n in range(target.bit_length())):
            rate = size / (size + half_rate)
            device = size * sample_s / rate * math.prod(work[value] for value in values)
            device *= 1.1 if size > cache else 1.0
            host = launch_s * launches[values[1]] * (1.3 if values[3] != AXES[3][0] else 1)
            seconds = target / size * max(host, device) * math.exp(odd)
            peak = size * kept.get(values[3], 1.0) * (0.6 if values[4] != AXES[4][0] else 1)
            expected = peak * math.exp(rng.normal(0, 0.02))
            wrong = scale + sum(misjudged[value] for value in values) + rng.normal(0, 0.03)
            expected_s = seconds * math.exp(wrong) if estimated else None
            points.append(point_of(values, size, expected, room, expected_s))
            step_s.append(seconds)
            runs_out.append(peak > room)
    return Surface(points, step_s, runs_out, typed_of(points))


def point_of(
    values: tuple[str, ...], size: int, peak: float, room: float, expected_s: float | None
) -> Point:
    """As a search sees it, by what is expected of its peak, in GiB, and of its time."""
    fits = Verdict.fits if peak < 0.93 * room else Verdict.tight
    return Point(
        values, size, 1, fits if peak < 1.05 * room else Verdict.does_not_fit,
        int(peak * 2**30), expected_s,
        math.prod(USUAL.get(value, 1.0) for value in values) * size**-0.07,
        needless_beside=needless_beside(values),
    )  # fmt: skip


def typed_of(points: list[Point]) -> int | None:
    """The middle one of the plain ones that fit."""
    plain = tuple(axis[0] for axis in AXES)
    typed = [n for n, p in enumerate(points) if p.values == plain and p.verdict is Verdict.fits]
    return typed[len(typed) // 2] if typed else None


def needless_beside(values: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The same without recomputing."""
    kept = tuple(KEEP_ALL if value.startswith("memory=") else value for value in values)
    return () if kept == values else (kept,)


def search(surface: Surface, seed: int, budget: int = 8, noise: float = 0.01) -> Found:
    """Look for the fastest point, with trials that are off by `noise`."""
    rng = np.random.default_rng(seed)
    looking = Search(list(surface.points), Objective.speed, budget, surface.typed)
    num_out = 0

    def measure(number: int) -> None:
        nonlocal num_out
        if surface.runs_out[number]:
            num_out += 1
            looking.tell(number, Trial(None, ran_out=True))
        else:
            seconds = surface.step_s[number] * math.exp(rng.normal(0, noise))
            looking.tell(number, Trial(seconds, noise))

    while chosen := looking.next():
        measure(chosen[0])
    while again := looking.to_confirm():
        for number in again:
            measure(number)
    ranking = looking.ranking()
    off = surface.step_s[ranking[0]] / surface.best_s if ranking else math.inf
    return Found(off, len(looking.trials), num_out)
