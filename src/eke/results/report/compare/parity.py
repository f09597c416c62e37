"""Does a configuration still learn the same? Its loss beside the baseline's, at equal samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean
from typing import Any

from eke.common.files import plain
from eke.common.units import format_number
from eke.plan.identity import canonical
from eke.plan.record import Record
from eke.results.report.compare.measures import LOSSES, samples_seen
from eke.results.report.compare.statistics import Sample, ratio
from eke.results.report.compare.variants import Variant

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
    for key in LOSSES:
        before, after = base.sample(key), other.sample(key)
        if not before or not after:
            continue
        if why := _differs(base.records, other.records):
            return Quality(Parity.other, key, why=why)
        return _judged(key, before, after)
    return Quality(Parity.unknown, why="no loss was measured")


def _judged(key: str, before: Sample, after: Sample) -> Quality:
    """The verdict on two losses by seed; fewer than three seeds can only show that they equal."""
    logs = [math.log(after[seed] / before[seed]) for seed in before if seed in after]
    found = ratio(before, after)
    assert found is not None
    difference = found.value - 1
    if logs and max(map(abs, logs)) <= EQUAL:
        return Quality(Parity.equal, key, difference)
    if found.low is None or found.high is None:
        why = "one seed" if found.n == 1 else format_number(found.n, "seed")
        return Quality(Parity.unresolved, key, difference, why)
    if found.high <= 1 + MARGIN:
        parity = Parity.better if found.high < 1 - MARGIN else Parity.within
    else:
        parity = Parity.worse if found.low > 1 + MARGIN else Parity.unresolved
    return Quality(parity, key, difference)


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
