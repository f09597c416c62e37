"""Export of a comparison: report.json has everything shown, report.csv one line per run.

Vega, Vega-Lite and vega-embed as one script for a page that loads nothing.

vl-convert carries them; putting them together takes seconds, so that the result is kept.

A comparison as Markdown, to paste into an issue or a pull request.
"""

import csv
import hashlib
import io
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

from eke.common.files import own_folder, read_text, write_atomic
from eke.data.sources import cache_folder
from eke.results.report.compare import Comparison, ComparisonRow, OneMachine
from eke.results.report.compare.claims import verdict_lines
from eke.results.report.compare.comparison import MARKS
from eke.results.report.compare.effects import Effect, PublishedRow
from eke.results.report.compare.load_records import Entry
from eke.results.report.compare.measures import MEASURES, PEAK, SAMPLES, measured_values
from eke.results.report.compare.statistics import Ratio
from eke.results.report.show.sections import Section, columns, count_outcomes, provenance, sections

REPORT_VERSION = 1
"""Increase it when a field of report.json changes its meaning or disappears."""


def as_plain(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON-ready values; memory in bytes, times in seconds."""
    return {
        "schema_version": REPORT_VERSION,
        "verdict": verdict_lines(comparison),
        "folders": list(comparison.folders),
        "sweeps": list(comparison.sweeps),
        "commands": [list(command) for command in comparison.commands],
        "factors": list(comparison.factors),
        "shared": dict(comparison.shared),
        "measures": {m.key: {"title": m.title, "unit": m.unit} for m in MEASURES},
        "machines": [_machine(part) for part in comparison.machines],
        "configurations": [_row(row) for row in comparison.rows],
        "notes": list(comparison.notes),
    }


def as_csv(comparison: Comparison) -> str:
    """CSV with one line per run: configuration, factors, outcome and every measure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys = [measure.key for measure in MEASURES]
    heading = ["configuration", "row", "machine", *comparison.factors, "seed", "repeat", "outcome",
               "reason", *keys, "run"]  # fmt: skip
    writer.writerow(map(_inert, heading))
    for row in comparison.rows:
        for entry in row.variant.entries:
            values = measured_values(entry.record) if entry.record else {}
            factors = [row.variant.factors.get(key, "") for key in comparison.factors]
            writer.writerow(
                [_inert(cell) for cell in (
                    row.variant.label, entry.row, row.variant.machine, *factors, *entry.repeat,
                    entry.outcome, entry.reason, *(values.get(key, "") for key in keys),
                    entry.folder or "",
                )]
            )  # fmt: skip
    return text.getvalue()


def _inert(cell: object) -> object:
    """Escape text that a spreadsheet would read as a formula, also after white space.

    https://owasp.org/www-community/attacks/CSV_Injection
    """
    if isinstance(cell, str) and cell.lstrip().startswith(tuple("=+-@\uff1d\uff0b\uff0d\uff20")):
        return f"'{cell}"
    return cell


def _machine(part: OneMachine) -> dict[str, Any]:
    return {
        "letter": part.machine.letter,
        "facts": part.machine.facts,
        "hosts": list(part.machine.hosts),
        "baseline": part.baseline.label if part.baseline else None,
        "equal_time_s": part.equal_time_s,
        "effects": [_effect(effect) for effect in part.effects],
        "alone": [{"configuration": v.label, "changes": change} for v, change in part.alone],
        "ladder": [
            {
                "configuration": rung.variant.label,
                "adds": rung.added,
                "ratios": _ratios(rung.ratios),
            }
            for rung in part.ladder
        ],
        "beside": [
            {"source": b.table.source, "hardware": b.table.hardware, "date": b.table.date,
             "baseline": b.table.baseline, "rows": [_published(row) for row in b.rows]}
            for b in part.published
        ],
    }  # fmt: skip


def _published(row: PublishedRow) -> dict[str, Any]:
    own = {SAMPLES.key: row.speed, PEAK.key: row.memory}
    published = {SAMPLES.key: row.published_speed, PEAK.key: row.published_memory}
    return {"row": row.row, "ratios": _ratios(own), "published_ratios": published}


def _effect(effect: Effect) -> dict[str, Any]:
    return {
        "factor": effect.factor,
        "value": effect.value,
        "reference": effect.reference,
        "pairs": effect.pairs,
        "ratios": _ratios(effect.ratios),
    }


def _row(row: ComparisonRow) -> dict[str, Any]:
    variant = row.variant
    return {
        "configuration": variant.label,
        "row": variant.row,
        "machine": variant.machine,
        "factors": dict(variant.factors),
        "outcomes": variant.outcomes,
        "is_baseline": row.is_baseline,
        "on_front": row.on_front,
        "estimates": {key: asdict(value) for key, value in row.estimates.items()},
        "ratios": _ratios(row.ratios),
        "loss": _named(asdict(row.quality)),
        "loss_at_equal_time": row.loss_at_equal_time,
        "prediction_error": row.prediction_error,
        "step_prediction_error": row.step_prediction_error,
        "phases": dict(row.phases),
        "runs": [_run(entry) for entry in variant.entries],
    }


def _run(entry: Entry) -> dict[str, Any]:
    seed, repeat = entry.repeat
    return {
        "seed": seed,
        "repeat": repeat,
        "outcome": entry.outcome,
        "reason": entry.reason,
        "rule": entry.rule,
        "overrides": list(entry.overrides),
        "folder": str(entry.folder) if entry.folder else None,
        "measures": measured_values(entry.record) if entry.record else {},
    }


def _ratios(ratios: Any) -> dict[str, Any]:
    return {key: _named(asdict(value)) for key, value in ratios.items() if isinstance(value, Ratio)}


def _named(plain: dict[str, Any]) -> dict[str, Any]:
    return {key: value.value if isinstance(value, Enum) else value for key, value in plain.items()}


def vega_script() -> str:
    """The script; it sets `window.vegaEmbed`."""
    version = metadata.version("vl-convert-python")
    path = cache_folder() / "report" / f"vega-{version}.js"
    script = _kept(path)
    if script is None:
        import vl_convert  # 80 MB on disk, needed for the page only

        bundle: Any = vl_convert.javascript_bundle  # its type stubs require a snippet (1.9)
        script = str(bundle())
        _keep(path, script)
    # These would end the script element.
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _kept(path: Path) -> str | None:
    """Cached script, if complete: its first line is its hash."""
    try:
        digest, _, script = read_text(path).partition("\n")
    except (OSError, ValueError):
        return None
    return script if digest == _digest(script) else None


def _keep(path: Path, script: str) -> None:
    try:
        own_folder(path.parent)
        write_atomic(path, f"{_digest(script)}\n{script}")
    except OSError:
        return  # not cached


def _digest(script: str) -> str:
    return hashlib.sha256(script.encode()).hexdigest()


MAX_ROWS = 200
"""Rows of the main table; GitHub truncates a comment at 65,536 characters."""


def render_markdown(comparison: Comparison, repeats: bool = False) -> str:
    """Render the report as Markdown, with names and errors escaped."""
    shown = columns(comparison, wide=False)
    cells = [[column.text(row) for column in shown] for row in comparison.rows[:MAX_ROWS]]
    first, *others = verdict_lines(comparison)
    lines = [f"**{escape(first)}**", ""]
    for line in others:
        lines += [escape(line), ""]
    lines += markdown_table([c.title for c in shown], cells, [c.is_number for c in shown])
    if len(comparison.rows) > MAX_ROWS:
        lines += ["", f"... and {len(comparison.rows) - MAX_ROWS} more rows: in report.csv"]
    lines += ["", MARKS, "", count_outcomes(comparison), ""]
    for section in [*sections(comparison, repeats), provenance(comparison)]:
        lines += _section(section)
    lines += [f"- {escape(note)}" for note in comparison.notes]
    return "\n".join(lines).rstrip() + "\n"


def escape(text: str) -> str:
    """Escape text for Markdown and HTML."""
    flat = " ".join(text.split())
    for sign in "\\`*_[]|":
        flat = flat.replace(sign, f"\\{sign}")
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _section(section: Section) -> list[str]:
    note = [escape(section.note), ""] if section.note else []
    cells = markdown_table(section.head, section.rows, [False] * len(section.head))
    return [f"### {section.title}", "", *cells, "", *note]


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[bool]
) -> list[str]:
    """Lines of a Markdown table with escaped cells; numbers are right-aligned."""
    rule = ["---:" if number else "---" for number in numbers]
    lines = [list(map(escape, head)), rule, *([escape(cell) for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]
