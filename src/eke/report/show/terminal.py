"""A comparison in a terminal, through rich."""

import io
import re
import shutil
import sys
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from eke.report.compare import Comparison, Row
from eke.report.compare.verdict import verdict
from eke.report.compare.wording import MARKS
from eke.report.show.columns import columns
from eke.report.show.sections import Section, counts, provenance, sections

PIPED_WIDTH = 160
"""Columns where the output is no terminal: a file is read with a wide window."""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, an escape's first one among them: a name could move the cursor."""

MAX_ROWS = 60
"""Of the main table; the page has all of them."""


def print_report(comparison: Comparison, repeats: bool = False) -> None:
    """Write to stdout; without a terminal neither colours nor its width."""
    sys.stdout.write(render_terminal(comparison, repeats, sys.stdout.isatty()))


def render_terminal(
    comparison: Comparison, repeats: bool = False, terminal: bool = False, width: int = 0
) -> str:
    """The report as text.

    Args:
        comparison: what is shown.
        repeats: every run by itself, too.
        terminal: with colours.
        width: columns; 0 is the terminal's, or PIPED_WIDTH.
    """
    wide = width or (shutil.get_terminal_size().columns if terminal else PIPED_WIDTH)
    stream = io.StringIO()
    console = Console(
        file=stream, width=wide, force_terminal=terminal, highlight=False, markup=False, emoji=False
    )
    console.print(Group(*_parts(comparison, repeats)))
    return "\n".join(line.rstrip() for line in stream.getvalue().split("\n"))


def _parts(comparison: Comparison, repeats: bool) -> list[RenderableType]:
    lines = verdict(comparison)
    parts: list[RenderableType] = [_text(lines[0], "bold"), *map(_text, lines[1:]), Text()]
    parts += [_main(comparison), Text(MARKS, style="dim"), Text(counts(comparison)), Text()]
    for section in sections(comparison, repeats):
        parts += [_section(section), Text()]
    parts += [_section(provenance(comparison))]
    parts += [_text(f"note: {note}") for note in comparison.notes]
    return parts


def _text(text: str, style: str = "") -> Text:
    return Text(CONTROL.sub("\N{REPLACEMENT CHARACTER}", text), style=style)


def _main(comparison: Comparison) -> Table:
    shown = columns(comparison, wide=False)
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    for column in shown:
        number = column.is_number
        table.add_column(
            column.title, justify="right" if number else "left", no_wrap=number, overflow="fold"
        )
    rows = _chosen(comparison.rows)
    for row in rows:
        table.add_row(*(_text(c.text(row)) for c in shown), style=_style(row))
    if len(rows) < len(comparison.rows):
        table.add_row(Text(f"... and {len(comparison.rows) - len(rows)} more: in the files"))
    return table


def _chosen(rows: Sequence[Row]) -> Sequence[Row]:
    """All, or of many the baseline, the front and the first."""
    if len(rows) <= MAX_ROWS:
        return rows
    told = [row for row in rows if row.is_baseline or row.on_front]
    rest = [row for row in rows if not (row.is_baseline or row.on_front)]
    kept = {id(row) for row in [*told, *rest][:MAX_ROWS]}
    return [row for row in rows if id(row) in kept]


def _style(row: Row) -> str:
    if row.is_baseline:
        return "bold"
    if not row.variant.records:
        return "dim"
    return "green" if row.on_front else ""


def _section(section: Section) -> Group:
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    for title in section.head:
        table.add_column(title, overflow="fold")
    for row in section.rows:
        table.add_row(*map(_text, row))
    note = [Text(section.note, style="dim")] if section.note else []
    return Group(Text(section.title, style="bold"), Padding(table, (0, 0, 0, 2)), *note)
