"""Terminal report, rendered by rich."""

import io
import shutil
from collections.abc import Sequence
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from eke.common.streams import printable
from eke.plan.record import Outcome
from eke.results.report.compare import Comparison, ComparisonRow
from eke.results.report.compare.claims import verdict_lines
from eke.results.report.compare.comparison import MARKS
from eke.results.report.compare.measures import EVAL_LOSS, PEAK, SAMPLES, TRAIN_LOSS
from eke.results.report.show.sections import (
    CHARS_FOR_NAMES,
    Column,
    Section,
    columns,
    count_outcomes,
    outcome_text,
    provenance,
    sections,
    shorter,
)

PIPED_WIDTH = 160
"""Width for output that is not a terminal."""

RANKS = (
    "machine", "outcome", f"ratio {SAMPLES.key}", f"ratio {PEAK.key}", "parity", EVAL_LOSS.key,
    TRAIN_LOSS.key, "n", SAMPLES.key, PEAK.key,
)  # fmt: skip
"""Columns of the main table by priority."""

LEAST_FOR_NAMES = 36
"""Minimum width of a configuration's name."""

ROOM_FOR_INTERVALS = 110
"""Minimum terminal width for intervals in the smaller tables."""

GAP = 2
"""Space between columns."""

MAX_ROWS = 60
"""Maximum rows of the main table; the page has all."""


def render_terminal(
    comparison: Comparison, repeats: bool = False, terminal: bool = False, width: int = 0
) -> str:
    """Render the report as text, with colours for a terminal; `width` 0 is its width."""
    wide = width or (shutil.get_terminal_size().columns if terminal else PIPED_WIDTH)
    stream = io.StringIO()
    console = Console(
        file=stream, width=wide, force_terminal=terminal, highlight=False, markup=False, emoji=False
    )
    console.print(Group(*_parts(comparison, repeats, wide)))
    return "\n".join(line.rstrip() for line in stream.getvalue().split("\n"))


def _parts(comparison: Comparison, repeats: bool, width: int) -> list[RenderableType]:
    lines = verdict_lines(comparison)
    parts: list[RenderableType] = [_text(lines[0], "bold"), *map(_text, lines[1:]), Text()]
    parts += [*_main(comparison, width), Text(MARKS, style="dim")]
    parts += [Text(count_outcomes(comparison)), Text()]
    for section in sections(comparison, repeats, brief=width < ROOM_FOR_INTERVALS):
        parts += [_section(section, width), Text()]
    parts += [_section(provenance(comparison), width)]
    parts += [_text(f"note: {note}") for note in comparison.notes]
    return parts


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text, colours=False), style=style)


def _main(comparison: Comparison, width: int) -> list[RenderableType]:
    rows = _chosen(comparison.rows)
    shown, left_out = _fitting(comparison, rows, width)
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    for each in shown:
        table.add_column(each.title, justify="right" if each.is_number else "left", no_wrap=True)
    for row in rows:
        ended = "green" if row.on_front else "" if row.variant.records else "dim"
        style = "bold" if row.is_baseline else ended
        table.add_row(*(_text(c.text(row)) for c in shown), style=style)
    if len(rows) < len(comparison.rows):
        table.add_row(Text(f"... and {len(comparison.rows) - len(rows)} more: in the files"))
    note = f"Omitted at {width} columns: {', '.join(left_out)} (widen the terminal to see them)"
    return [table, Text(note, style="dim")] if left_out else [table]


def _fitting(
    comparison: Comparison, rows: Sequence[ComparisonRow], width: int
) -> tuple[list[Column], list[str]]:
    """Columns that fit the width, and titles of the others."""

    def needs(column: Column) -> int:
        texts = [column.title, *map(column.text, rows)]
        return GAP + max(cell_len(printable(text, colours=False)) for text in texts)

    label, *others = columns(comparison, wide=False)
    if all(outcome_text(row) == Outcome.ok.name for row in rows):
        others = [c for c in others if c.key != "outcome"]
    least = min(LEAST_FOR_NAMES, width // 2)
    room = width + GAP - min(needs(label), least + GAP)
    if sum(map(needs, others)) > room:
        others = list(map(_short, others))
    kept: dict[str, int] = {}
    ranked = sorted(others, key=lambda c: RANKS.index(c.key) if c.key in RANKS else len(RANKS))
    for column in ranked:
        if needs(column) <= room - sum(kept.values()):
            kept[column.key] = needs(column)
    left = width - sum(kept.values())
    for most in (left, left - len(" (baseline)")):
        if needs(label) - GAP > left:
            label = columns(comparison, wide=False, most=min(most, CHARS_FOR_NAMES))[0]
    left_out = [c.title for c in others if c.key not in kept]
    return [label, *(c for c in others if c.key in kept)], left_out


def _short(column: Column) -> Column:
    return replace(column, text=lambda row: shorter(column.text(row)))


def _chosen(rows: Sequence[ComparisonRow]) -> Sequence[ComparisonRow]:
    """All rows; of many, the baseline, the front and the first."""
    if len(rows) <= MAX_ROWS:
        return rows
    ranked = sorted(rows, key=lambda row: not (row.is_baseline or row.on_front))
    kept = set(ranked[:MAX_ROWS])
    return [row for row in rows if row in kept]


def _section(section: Section, width: int) -> Group:
    """A table wrapped between words, or one line per value if it does not fit."""
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    cells = list(zip(section.head, *section.rows, strict=True))
    words = [max(map(cell_len, " ".join(column).split()), default=0) for column in cells]
    words = [min(longest, max(width // 2, LEAST_FOR_NAMES)) for longest in words]
    if sum(words) + GAP * len(words) > width:
        for row in section.rows:
            pairs = zip(section.head, row, strict=True)
            table.add_row(_text("; ".join(f"{title}: {cell}" for title, cell in pairs if cell)))
        table.show_header = False
    else:
        for title, longest in zip(section.head, words, strict=True):
            table.add_column(title, overflow="fold", min_width=longest)
        for row in section.rows:
            table.add_row(*map(_text, row))
    note = [Text(section.note, style="dim")] if section.note else []
    return Group(Text(section.title, style="bold"), Padding(table, (0, 0, 0, 2)), *note)
