"""Does a configuration still learn the same? Its loss beside the baseline's, at equal samples."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean
from typing import Any, cast

from eke.files import plain
from eke.identity import canonical
from eke.record import Record
from eke.report.compare.measures import EVAL_LOSS, TRAIN_LOSS, samples_seen
from eke.report.compare.statistics import Sample, ratio
from eke.report.compare.variants import Variant
from eke.units import format_number

MARGIN = 0.01
"""How much higher a loss may be and still count as no worse: chosen, and said where it is used."""

EQUAL = 1e-5
"""Relative difference up to which two losses are those of the same mathematics: the bound of
tests/equivalence for float32 over 20 steps."""


ANOTHER_TRAINING = "another model, task or data"
"""Why neither losses nor what pays can be told of two configurations."""


class Parity(Enum):
    """The loss beside the baseline's."""

    baseline = "baseline"
    equal = "equal"
    within = "within 1 %"
    better = "lower"
    worse = "higher"
    unresolved = "not resolved"
    other = "not comparable"
    unknown = ""


@dataclass(frozen=True)
class Quality:
    """The verdict on a configuration's loss."""

    parity: Parity
    measure: str = ""
    """Key of the loss that was compared."""
    difference: float | None = None
    """Relative to the baseline's; positive is higher."""
    why: str = ""

    @classmethod
    def unknown(cls) -> "Quality":
        """Nothing to compare, or nothing to compare with."""
        return cls(Parity.unknown)


def quality(base: Variant, other: Variant) -> Quality:
    """Compare losses of one machine's variants.

    Fewer than three seeds resolve no difference, which counts against nothing: under dropout and
    with other numerics, two trainings of one seed differ by chance.
    """
    if other is base:
        return Quality(Parity.baseline)
    for measure in (EVAL_LOSS, TRAIN_LOSS):
        before, after = base.sample(measure.key), other.sample(measure.key)
        if not before or not after:
            continue
        if why := _differs(base.records, other.records):
            return Quality(Parity.other, measure.key, why=why)
        all_runs = ratio(before, after)
        found = ratio(*map(_by_seed, (before, after)))
        assert found is not None
        assert all_runs is not None
        difference = found.value - 1
        ends = [end for end in (all_runs.low, all_runs.high, all_runs.value) if end is not None]
        if max(abs(math.log(end)) for end in ends) <= EQUAL:
            return Quality(Parity.equal, measure.key, difference)
        if found.low is None or found.high is None:
            why = format_number(found.n, "seed")
            return Quality(Parity.unresolved, measure.key, difference, why)
        low, high = found.low, found.high
        if high <= 1 + MARGIN:
            parity = Parity.better if high < 1 - MARGIN else Parity.within
        else:
            parity = Parity.worse if low > 1 + MARGIN else Parity.unresolved
        return Quality(parity, measure.key, difference)
    return Quality(Parity.unknown, why="no loss was measured")


def _by_seed(sample: Sample) -> Sample:
    """One observation of each seed: repeats that share it draw the same numbers."""
    values: dict[Hashable, list[float]] = {}
    for (seed, *_), value in cast(Mapping[tuple[int, ...], float], sample).items():
        values.setdefault(seed, []).append(math.log(value))
    return {seed: math.exp(fmean(logs)) for seed, logs in values.items()}


def _differs(base: Sequence[Record], other: Sequence[Record]) -> str:
    """Why two losses say nothing about each other; empty if they do."""
    if not _learn_alike(base, other):
        return ANOTHER_TRAINING
    seen = [fmean([samples_seen(r) or 0 for r in records]) for records in (base, other)]
    if seen[0] != seen[1]:
        return f"{seen[1]:.0f} samples seen, the baseline {seen[0]:.0f}"
    return ""


def is_another_training(base: Variant, other: Variant) -> bool:
    """Whether they learn different things, so that neither's speed pays for the other."""
    return bool(base.records and other.records) and not _learn_alike(base.records, other.records)


def _learn_alike(base: Sequence[Record], other: Sequence[Record]) -> bool:
    before, after = ({canonical(plain(_learns(r))) for r in each} for each in (base, other))
    return before == after


def _learns(record: Record) -> list[Any]:
    """What a run learns, and from what."""
    config = record.config
    model, task, data = (config.get(group) for group in ("model", "task", "data"))
    length = data.get("seq_len") if isinstance(data, dict) else None
    return [model, task, length, record.plan.get("data_fingerprint")]
