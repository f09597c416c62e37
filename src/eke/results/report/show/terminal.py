"""Terminal report, rendered by rich."""

import io
import sys
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from eke.common.output import printable
from eke.results.report.compare import Comparison, ComparisonRow
from eke.results.report.compare.sentences import verdict_lines
from eke.results.report.show.report_sections import (
    Section,
    measured,
    problems,
    provenance,
    report_title,
    sections,
)
from eke.results.report.show.table import Column, columns, groups

_GAP = 2
"""Space between columns."""

_LEAST_FOR_NAMES = 36
"""Minimum width of a configuration's name."""

MAX_ROWS = 60
"""Maximum rows of the main table. The page has all."""


def render_terminal(
    comparison: Comparison,
    repeats: bool = False,
    colours: bool = False,
    width: int = 160,
    everything: bool = False,
) -> str:
    """Render the report as text: verdict, table, failures and one line of provenance.

    `repeats` adds every run, `everything` also techniques, classes, sources and the provenance.
    """
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, force_terminal=colours, no_color=False, highlight=False,
        markup=False, emoji=False,
    )  # fmt: skip
    lines, notes = verdict_lines(comparison), comparison.notes
    parts: list[RenderableType] = [_text(report_title(comparison), "dim"), _text(lines[0], "bold")]
    parts += [*map(_text, lines[1:]), Text()]
    for group in groups(comparison):
        parts += [_text(group.heading, "bold")] if group.heading else []
        parts += [_main(comparison, group.rows, width), Text()]
    shown = problems(comparison)
    if everything or repeats:
        shown += [*sections(comparison, repeats), provenance(comparison)]
    for section in shown:
        parts += [_section(section, width), Text()]
    most = len(notes) if everything else 3
    parts += [_text(f"note: {note}") for note in notes[:most]]
    more = [f"{len(notes) - most} more notes"] if len(notes) > most else []
    told = [measured(comparison), *more, *([] if everything else ["more: --provenance"])]
    console.print(Group(*parts, _text("; ".join(told), "dim")))
    return "\n".join(line.rstrip() for line in stream.getvalue().split("\n"))


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text, colours=False), style=style)


def _main(comparison: Comparison, every: Sequence[ComparisonRow], width: int) -> Table:
    rows = every[:MAX_ROWS]
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    shown = _fitting_columns(comparison, rows, width)
    styles = {"good": "green", "bad": "red"}  # in addition to a word
    for number, (column, _) in enumerate(shown):
        table.add_column(column.title, no_wrap=number > 0, overflow="fold")
    for row in rows:
        style = "bold" if row.is_baseline else "" if row.variant.records else "dim"
        cells = [(column.cell(row), level) for column, level in shown]
        texts = [_text(cell.line(level), styles.get(cell.tone, "")) for cell, level in cells]
        table.add_row(*texts, style=style)
    if len(rows) < len(every):
        table.add_row(Text(f"... and {len(every) - len(rows)} more: in the files"))
    return table


def _fitting_columns(
    comparison: Comparison, rows: Sequence[ComparisonRow], width: int
) -> list[tuple[Column, int]]:
    """Return the columns that fit the width, each with the level of detail of its cells."""

    def needs(column: Column, level: int) -> int:
        texts = [column.title, *(column.cell(row).line(level) for row in rows)]
        return _GAP + max(cell_len(printable(text, colours=False)) for text in texts)

    label, *others = columns(comparison, rows, sys.maxsize)  # wrapped, not cut
    words = (word for row in rows for word in label.cell(row).line().split())
    longest = min(max(map(cell_len, words), default=0) + _GAP, 2 * width // 3)
    least = max(min(_LEAST_FOR_NAMES, width // 2 - _GAP), longest)
    # Title and verdict have the same facts as the last two columns.
    by_rank = sorted(others, key=lambda column: (column.key == "decision", column.key == "n"))
    levels: dict[str, int] = {}
    sizes: dict[str, int] = {}
    room = width + _GAP - min(needs(label, 0), least)
    for level in range(3):  # all columns first, then names, then details
        for column in by_rank:
            size = needs(column, level)
            is_candidate = level == 0 or column.key in sizes
            if is_candidate and size - sizes.get(column.key, 0) <= room - sum(sizes.values()):
                sizes[column.key], levels[column.key] = size, level
        if level == 0:
            room = width + _GAP - min(needs(label, 0), width + _GAP - sum(sizes.values()))
    return [(label, 0), *((c, levels[c.key]) for c in others if c.key in sizes)]


def _section(section: Section, width: int) -> Group:
    """Return a table wrapped between words, or one line per row if it does not fit."""
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    cells = list(zip(section.head, *section.rows, strict=True))
    words = [max(map(cell_len, " ".join(column).split()), default=0) for column in cells]
    words = [min(longest, max(width // 2, _LEAST_FOR_NAMES)) for longest in words]
    if sum(words) + _GAP * len(words) > width:
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
