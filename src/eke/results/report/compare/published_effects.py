"""What others have published of a named sweep's rows, as effects beside one's own."""

from collections.abc import Sequence
from dataclasses import dataclass

from eke.results.report.compare.measures import PEAK, SAMPLES
from eke.results.report.compare.statistics import Ratio, ratio
from eke.results.report.compare.variants import Variant
from eke.results.report.published import Figures, Published, published_for


@dataclass(frozen=True)
class PublishedRow:
    """One row of a sweep: times its baseline, here and there."""

    row: str
    speed: Ratio | None
    memory: Ratio | None
    published_speed: float | None
    published_memory: float | None


@dataclass(frozen=True)
class Beside:
    """A published table and one's own numbers of the same rows."""

    table: Published
    rows: tuple[PublishedRow, ...]


def beside(sweeps: Sequence[str], variants: Sequence[Variant]) -> list[Beside]:
    """Published tables about some sweeps, beside one machine's variants.

    Args:
        sweeps: names of sweep definitions.
        variants: of one machine.

    Returns:
        Tables of which the baseline and at least one other row have been measured here.
    """
    by_row = {row: v for v in variants if v.records for row in v.rows}
    found = []
    for table in (table for sweep in sweeps for table in published_for(sweep)):
        base = by_row.get(table.baseline)
        others = [row for row in table.rows if row != table.baseline and row in by_row]
        if base is not None and others:
            rows = [_row(table, row, base, by_row[row]) for row in others]
            found.append(Beside(table, tuple(rows)))
    return found


def _row(table: Published, row: str, base: Variant, other: Variant) -> PublishedRow:
    there, before = table.rows[row], table.rows[table.baseline]
    memory = None
    if there.peak_memory_mb and before.peak_memory_mb:
        memory = there.peak_memory_mb / before.peak_memory_mb
    return PublishedRow(
        row,
        ratio(base.sample(SAMPLES.key), other.sample(SAMPLES.key)),
        ratio(base.sample(PEAK.key), other.sample(PEAK.key)),
        _speed(there, before),
        memory,
    )


def _speed(there: Figures, before: Figures) -> float | None:
    """Times the baseline's, from whichever figure a source prints of both."""
    for after, base in (
        (there.samples_per_s, before.samples_per_s),
        (before.runtime_s, there.runtime_s),
    ):
        if after and base:
            return after / base
    return None if there.diff_frac is None else 1 + there.diff_frac
