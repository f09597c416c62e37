"""The end of a sweep as a table: the outcome of every cell."""

from collections.abc import Sequence
from typing import Protocol

from eke.common.text_table import align
from eke.common.units import format_bytes, format_seconds
from eke.plan.record import Record

HEADER = ("outcome", "samples/s", "step", "peak memory", "eval loss", "what differs")


class CellLike(Protocol):
    """What a cell of a sweep shows."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """What sets it apart."""
        ...

    @property
    def outcome(self) -> str:
        """How it ended."""
        ...

    @property
    def reason(self) -> str:
        """Why it did not end well."""
        ...


def render_cells(cells: Sequence[tuple[CellLike, Record | None]], names: Sequence[str] = ()) -> str:
    """One line a cell, then the reason of each that did not end well; absent numbers are blank.

    Args:
        cells: each with its record, if it has one.
        names: the name of each cell's row, where the sweep has rows.
    """
    labels = label_cells([cell.overrides for cell, _ in cells], names)
    rows = [_row(cell, record, label) for (cell, record), label in zip(cells, labels, strict=True)]
    lines = align([HEADER, *rows])
    for (cell, _), label in zip(cells, labels, strict=True):
        if cell.reason:
            lines += ["", f"{cell.outcome}: {label}", f"  {cell.reason}"]
    return "\n".join(lines)


def label_cells(overrides: Sequence[tuple[str, ...]], names: Sequence[str] = ()) -> list[str]:
    """A short name for each cell: its row, if it has one, and what differs between cells."""
    labels = [" ".join(label) for label in differing(overrides)]
    if not any(names):
        return labels
    pairs = zip(names, labels, strict=True)
    return [f"{name}: {label}" if label else name for name, label in pairs]


def differing(overrides: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Of each cell only what not every cell has; a single cell keeps everything."""
    if len(overrides) < 2:
        return list(overrides)
    shared = set(overrides[0]).intersection(*overrides[1:])
    return [tuple(o for o in cell if o not in shared) for cell in overrides]


def _row(cell: CellLike, record: Record | None, label: str) -> tuple[str, ...]:
    rate = step = memory = loss = ""
    if record is not None:
        # A speed that others on the device took part in is no measurement.
        alone = not record.shared_device
        if alone and record.throughput.samples_per_s is not None:
            rate = f"{record.throughput.samples_per_s:.2f}"
        if alone and record.timing.steady_step_s:
            step = format_seconds(record.timing.steady_step_s.median)
        measured = record.memory.measured
        if measured and measured.peak_allocated_bytes is not None:
            memory = format_bytes(measured.peak_allocated_bytes)
        if record.loss.eval_final is not None:
            loss = f"{record.loss.eval_final:.4f}"
    return (cell.outcome or "not run", rate, step, memory, loss, label)
