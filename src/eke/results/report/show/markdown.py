"""A comparison as Markdown, to paste into an issue or a pull request."""

from collections.abc import Sequence

from eke.results.report.compare import Comparison
from eke.results.report.compare.verdict import verdict
from eke.results.report.compare.wording import MARKS
from eke.results.report.show.columns import columns
from eke.results.report.show.sections import Section, counts, provenance, sections

MAX_ROWS = 200
"""Of the main table: GitHub cuts a comment at 65,536 characters."""


def render_markdown(comparison: Comparison, repeats: bool = False) -> str:
    """The report as Markdown; whatever a run's name or error holds, it stays text."""
    shown = columns(comparison, wide=False)
    cells = [[column.text(row) for column in shown] for row in comparison.rows[:MAX_ROWS]]
    first, *others = verdict(comparison)
    lines = [f"**{escape(first)}**", ""]
    for line in others:
        lines += [escape(line), ""]
    lines += table([c.title for c in shown], cells, [c.is_number for c in shown])
    if len(comparison.rows) > MAX_ROWS:
        lines += ["", f"... and {len(comparison.rows) - MAX_ROWS} more rows: in report.csv"]
    lines += ["", MARKS, "", counts(comparison), ""]
    for section in [*sections(comparison, repeats), provenance(comparison)]:
        lines += _section(section)
    lines += [f"- {escape(note)}" for note in comparison.notes]
    return "\n".join(lines).rstrip() + "\n"


def escape(text: str) -> str:
    """Text that neither Markdown nor HTML reads as anything else."""
    flat = " ".join(text.split())
    for sign in "\\`*_[]|":
        flat = flat.replace(sign, f"\\{sign}")
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _section(section: Section) -> list[str]:
    note = [escape(section.note), ""] if section.note else []
    cells = table(section.head, section.rows, [False] * len(section.head))
    return [f"### {section.title}", "", *cells, "", *note]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[bool]) -> list[str]:
    """Lines of a Markdown table; every cell is escaped, and numbers stand on the right."""
    rule = ["---:" if number else "---" for number in numbers]
    lines = [list(map(escape, head)), rule, *([escape(cell) for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]
