"""Loss curves over training time (without start-up, evaluation and compiling), and noise notes."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

from eke.common.paths import RunPaths
from eke.plan.record import Outcome, metrics
from eke.results.report.compare.measures import LARGEST, SAMPLE_SPEED, TOKEN_SPEED, ended_s
from eke.results.report.compare.statistics import Compared
from eke.results.report.compare.variants import Variant


@dataclass(frozen=True)
class Curve:
    """One run's loss over time."""

    seconds: tuple[float, ...]
    """Cumulative time of the steps. Warm-up and compiling steps count as the median of the others,
    if there are any."""
    losses: tuple[float, ...]
    """Moving average over 5 % of the steps."""
    steps: tuple[int, ...]
    """Optimizer steps done."""

    def at(self, seconds: float) -> float | None:
        """Return the loss at a time, or None before the first step."""
        number = bisect_right(self.seconds, seconds)
        return self.losses[number - 1] if number else None


def curves_of(variant: Variant, most: int, with_shared: bool = True) -> list[Curve]:
    """Return at most `most` curves of different seeds, with or without shared devices."""
    found: dict[int, Curve] = {}
    for entry in variant.entries:
        seed, record, folder = entry.repeat[0], entry.record, entry.folder
        if record is None or folder is None or entry.outcome != Outcome.ok.name:
            continue
        if seed not in found and len(found) < most and (with_shared or not record.shared_device):
            curve = read_curve(RunPaths(folder))
            found |= {seed: curve} if curve else {}
    return list(found.values())


def read_curve(paths: RunPaths) -> Curve | None:
    """Return a curve of metrics.jsonl, or None without usable rows."""
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
    steady = [float(row[metrics.STEP_TIME]) for row in timed if metrics.WARMUP not in row]
    usual = median(steady) if steady else math.inf
    seconds = list(accumulate(
        min(usual if metrics.WARMUP in row else math.inf, float(row[metrics.STEP_TIME]))
        for row in timed
    ))  # fmt: skip
    window, losses = max(1, math.ceil(0.05 * len(timed))), [r[metrics.LOSS] for r in timed]
    every = math.ceil(len(seconds) / 200)  # a chart of 700 pixels shows no more points
    kept = sorted({*range(0, len(seconds), every), len(seconds) - 1})
    return Curve(
        tuple(seconds[n] for n in kept),
        tuple(fmean(losses[max(0, n + 1 - window) : n + 1]) for n in kept),
        tuple(int(timed[n][metrics.STEP]) for n in kept),
    )


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST


SPREAD = 1.3
"""Fastest over slowest repeat above which the baseline counts as noisy."""


def repeat_spread(variant: Variant) -> float:
    """Return the fastest over the slowest repeat, or 1 without speeds."""
    speeds = variant.sample(SAMPLE_SPEED.key).values()
    return max(speeds) / min(speeds) if speeds else 1.0


def quiet_notes(
    base: Variant | None, variants: Sequence[Variant], noise: Mapping[str, Compared]
) -> list[str]:
    """Return notes on noisy configurations of one machine, and on pairs distant in time."""
    if base is None:
        return []
    speeds = noise.get(SAMPLE_SPEED.key) or noise[TOKEN_SPEED.key]
    notes = [
        f"{each.label}: noisier than the others, repeats differ by {repeat_spread(each):.2f}x"
        for each in variants if speeds.is_noisy(each)
    ]  # fmt: skip
    if apart := sorted(_apart(base, variants), reverse=True):
        seconds, label = apart[0]
        others = f" (and {len(apart) - 1} more pairs)" if len(apart) > 1 else ""
        when = f"{seconds / 60:.0f} min before or after the baseline's{others}"
        why = "the machine may have changed in between"
        notes.append(f"a repeat of {label} was measured {when}: {why}")
    return notes


def _apart(base: Variant, variants: Sequence[Variant]) -> list[tuple[float, str]]:
    """Return seconds between ends of distant pairs, with labels, unless their round explains it."""
    rounds: dict[tuple[int, int], list[tuple[float, float, Variant]]] = {}
    for each in variants:
        for repeat, record in each.by_repeat():
            if (end := ended_s(record)) is not None and record.timing.train_s is not None:
                took = record.timing.train_s + (record.timing.startup_s or 0.0)
                rounds.setdefault(repeat, []).append((end, took, each))
    found = []
    for runs in rounds.values():
        start = next((end for end, _, each in runs if each is base), None)
        for end, _, each in runs if start is not None else []:
            first, last = sorted((start or end, end))
            # Twice, for evaluation and the time between runs.
            busy = 2 * sum(took for moment, took, _ in runs if first < moment <= last)
            if last - first > busy + 600:  # a laptop cools down in fewer seconds
                found.append((last - first, each.label))
    return found
