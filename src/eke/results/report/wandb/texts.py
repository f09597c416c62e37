"""The words and tables of a report at W&B, as Markdown that names cannot break out of."""

from pathlib import Path

from eke.results.report.compare import Comparison
from eke.results.report.compare.verdict import verdict
from eke.results.report.compare.wording import MARKS
from eke.results.report.show.columns import columns
from eke.results.report.show.markdown import escape, table
from eke.results.report.show.sections import Section, counts
from eke.results.report.wandb.place import Filter, Place

MAX_ROWS, MAX_SECTION_ROWS = 100, 50
"""Rows of the main table and of each other: W&B lays the whole report out in the browser, and says
nothing of a limit. report.csv has all."""
MAX_CHARS = 300
"""Of a table's cell: messages of exceptions can be pages."""
MAX_TITLE_CHARS = 128
"""wandb-workspaces 0.4 refuses a longer one."""


def title(comparison: Comparison) -> str:
    """Names of the sweeps, else the folders."""
    names = comparison.sweeps or tuple(Path(folder).name for folder in comparison.folders)
    return cut(printable(f"eke: {', '.join(names) or 'runs'}"), MAX_TITLE_CHARS)


def opening(comparison: Comparison) -> str:
    """The verdict, and how many runs ended how."""
    first, *others = verdict(comparison)
    lines = [f"**{told(first)}**", *map(told, others), told(counts(comparison))]
    return "\n\n".join(lines)


def live(found: Filter, place: Place) -> str:
    """What the panels show, and why that may be more or less than the tables."""
    return (
        f"These panels are live: {told(str(found))} in project {told(place.project)}, as the "
        "server has them now. The tables and sentences are of the time of writing."
    )


def main_table(comparison: Comparison) -> str:
    """One line for each configuration."""
    shown = columns(comparison, wide=False)
    cells = [[_cell(column.text(row)) for column in shown] for row in comparison.rows[:MAX_ROWS]]
    lines = table([c.title for c in shown], cells, [c.is_number for c in shown])
    more = len(comparison.rows) - MAX_ROWS
    rest = ["", f"... and {more} more rows: in report.csv"] if more > 0 else []
    return _guarded("\n".join([*lines, *rest, "", MARKS]))


def section_table(section: Section) -> str:
    """A section without its title."""
    rows = [[_cell(cell) for cell in row] for row in section.rows[:MAX_SECTION_ROWS]]
    lines = table(section.head, rows, [False] * len(section.head))
    more = len(section.rows) - MAX_SECTION_ROWS
    rest = ["", f"... and {more} more rows: in report.md"] if more > 0 else []
    note = ["", escape(printable(section.note))] if section.note else []
    return _guarded("\n".join([*lines, *rest, *note]))


def notes(comparison: Comparison) -> str:
    """What could not be read, and what else is to be known."""
    return "\n".join(f"- {told(note)}" for note in comparison.notes)


def told(text: str) -> str:
    """A sentence that stays text: no mark-up, no formula, no heading."""
    flat = _guarded(escape(cut(printable(text), 10 * MAX_CHARS)))
    return f"\\{flat}" if flat[:1] in ("#", "+", "-", "=") else flat


def cut(text: str, limit: int) -> str:
    """Text of at most `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def printable(text: str) -> str:
    """Text that JSON, and a server's database, can hold: no half characters, no control signs."""
    whole = text.encode(errors="replace").decode()
    return "".join(sign if sign.isprintable() else " " for sign in whole)


def _cell(text: str) -> str:
    return cut(printable(text), MAX_CHARS)


def _guarded(text: str) -> str:
    """Dollar signs that begin no formula, for W&B reads these too; and nothing struck out."""
    return text.replace("$", "\\$").replace("~", "\\~")
