"""Training loss over the time that training took, start-up, evaluation and compiling left out."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from eke.common.paths import RunPaths
from eke.plan.record import Outcome, metrics
from eke.plan.record.derive import is_steady
from eke.results.report.compare.variants import Variant

MAX_POINTS = 200
"""Of a drawn curve: more than a chart of 700 pixels shows."""

WINDOW_FRAC = 0.05
"""Share of a run's steps that a loss at a moment is the mean of: a micro-batch's loss is noisy."""


@dataclass(frozen=True)
class Curve:
    """One run's loss over time."""

    seconds: tuple[float, ...]
    """Steps' own time so far; a step that warms up or compiles counts as long as the median of
    the others, where there are any."""
    losses: tuple[float, ...]
    """Mean of the last steps (WINDOW_FRAC of them)."""

    def at(self, seconds: float) -> float | None:
        """The loss when so much time was spent; None before the first step."""
        number = bisect_right(self.seconds, seconds)
        return self.losses[number - 1] if number else None

    @property
    def end(self) -> float:
        """Seconds of the whole run."""
        return self.seconds[-1]


def curve_of(variant: Variant) -> Curve | None:
    """Of its first repeat that ended well and has steps to show."""
    for entry in variant.entries:
        if entry.folder is None or entry.record is None or entry.outcome != Outcome.ok.name:
            continue
        if not entry.record.shared_device and (curve := read_curve(RunPaths(entry.folder))):
            return curve
    return None


def read_curve(paths: RunPaths) -> Curve | None:
    """From metrics.jsonl; None where that says nothing."""
    try:
        rows, _ = metrics.read_rows(paths.metrics)
    except OSError:
        return None
    timed = [
        row for row in metrics.latest(rows, metrics.LOSS)
        if _is_finite(row.get(metrics.STEP_TIME)) and _is_finite(row[metrics.LOSS])
    ]  # fmt: skip
    if len(timed) < 2:
        return None
    steady = [float(row[metrics.STEP_TIME]) for row in timed if is_steady(row)]
    usual = median(steady) if steady else math.inf
    steps = [
        (row[metrics.STEP_TIME] if is_steady(row) else min(usual, row[metrics.STEP_TIME]),
         row[metrics.LOSS])
        for row in timed
    ]  # fmt: skip
    window = max(1, math.ceil(WINDOW_FRAC * len(steps)))
    seconds, losses, total = [], [], 0.0
    for number, (duration, _) in enumerate(steps):
        total += duration
        seconds.append(total)
        losses.append(fmean(loss for _, loss in steps[max(0, number + 1 - window) : number + 1]))
    return _thin(seconds, losses)


def _thin(seconds: Sequence[float], losses: Sequence[float]) -> Curve:
    """At most MAX_POINTS, the last one among them."""
    every = math.ceil(len(seconds) / MAX_POINTS)
    kept = sorted({*range(0, len(seconds), every), len(seconds) - 1})
    return Curve(tuple(seconds[n] for n in kept), tuple(losses[n] for n in kept))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
