"""docs/reference/measured.md: the main measurements, each from a record in results/."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from reference import accuracy
from reference.benchmarks_page import (
    SECTIONS,
    Source,
    found_records,
    missing_records,
    origin,
)
from reference.cards import TECHNIQUES
from reference.claims import VERDICTS, read_answers, read_guides, read_sections
from reference.claims_tables import answers_table
from reference.gpu import never_seen

from eke.config.compose.catalogue import make_catalogue

HEAD = """\
# Measured

*For those who want to know how fast eke is, how right its forecasts are, and which advice of the
guides holds.*

Every number comes from a record in `results/`, by `make pages`. Numbers of one machine say little
about another. Brackets are the 10th and the 90th percentile of rounds in which the compared
programs took turns. All tables: [benchmarks](../../notes/benchmarks.md),
[accuracy](../../notes/accuracy.md), [claims](../../notes/claims.md).
"""

SHOWN = ("Single runs on a GPU", "Recipes", "Start-up", "Reports")
"""Sections of notes/benchmarks.md that are shown here, without their records' history."""


def measured_page(results: Path) -> str:
    """The whole page, ending in a newline."""
    parts = [HEAD, _claims(results)]
    for title in SHOWN:
        (section,) = (each for each in SECTIONS if each.title == title)
        parts.append(f"## {section.title}\n\n{section.question}\n")
        parts += [text for source in section.sources for text in _tables(source, results)]
    parts += [_accuracy(results), _not_measured(results)]
    return "\n".join(_without_absent("\n".join(parts)))


def _without_absent(page: str) -> Iterator[str]:
    """Lines of a page. Cells that were not measured are empty, rows of them are left away."""
    for line in page.split("\n"):
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        if not line.startswith("|") or any(cell not in ("", accuracy.ABSENT) for cell in cells):
            yield line.replace(f" {accuracy.ABSENT} |", "  |")


def _tables(source: Source, results: Path) -> list[str]:
    return [
        f"{origin(content)}\n\n{source.show(content)}\n"
        for content in found_records(source, results).values()
    ]


def _claims(results: Path) -> str:
    counts = Counter(c.verdict for section in read_sections() for c in section.claims)
    said = ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])
    table = answers_table(read_answers(), read_guides(), results)
    rows = [line for line in table.splitlines() if line.startswith("|")]
    return (
        "## What Hugging Face's guides advise\n\n"
        f"{counts.total()} claims of five guides, by verdict: {said}. "
        "The table has the guides' answers (speed, memory) and the records'.\n\n"
        + "\n".join(rows) + "\n"
    )  # fmt: skip


def _accuracy(results: Path) -> str:
    tables = accuracy.main_tables(results)
    return (
        "## Accuracy of forecasts\n\n"
        "Memory by formulas, memory by a trace of the training step, and the time of a step.\n\n"
        + "\n\n".join(tables) + "\n"
    )  # fmt: skip


def _not_measured(results: Path) -> str:
    missing = [
        name
        for section in SECTIONS
        for source in section.sources
        for name in missing_records(source, found_records(source, results))
    ]
    options = make_catalogue().options
    unseen = never_seen([f"{g}={o}" for g in TECHNIQUES for o in options[g]], results)
    listed = ", ".join(f"`{each}`" for each in (*unseen, *dict.fromkeys(missing)))
    return f"An empty cell was not measured, nor were {listed}.\n" if listed else ""
