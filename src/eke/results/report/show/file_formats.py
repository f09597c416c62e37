"""Export of a comparison.

report.json has all values, report.csv one line per run. report.html is one file that works offline,
with charts and a sortable table. report.md is for issues.
"""

import csv
import io
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from enum import Enum
from importlib import metadata, resources
from typing import Any

from eke.common.files import json_safe, make_private_dir, read_text, write_atomic
from eke.common.output import escape, printable
from eke.common.process_env import SAFE_PATH
from eke.data.sources import cache_folder
from eke.results.report.compare import Comparison, ComparisonRow, MachineComparison
from eke.results.report.compare.claims import Claim, find_claims, with_beside
from eke.results.report.compare.measures import MEASURES
from eke.results.report.compare.sentences import verdict_lines
from eke.results.report.compare.statistics import Ratio
from eke.results.report.show.charts import charts
from eke.results.report.show.report_sections import (
    METHOD,
    Lines,
    measured,
    problems,
    provenance,
    report_title,
    sections,
    winner_command,
)
from eke.results.report.show.table import Cell, columns, groups


def as_plain(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON-ready values, with memory in bytes and times in seconds."""
    return {
        # Increase it if a field changes its meaning or disappears.
        "schema_version": 1,
        "verdict": verdict_lines(comparison),
        "claims": [_claim(claim) for claim in with_beside(find_claims(comparison))],
        "folders": list(comparison.folders),
        "sweeps": list(comparison.sweeps),
        "commands": [list(command) for command in comparison.commands],
        "factors": list(comparison.factors),
        "shared": dict(comparison.shared),
        "measures": {m.key: {"title": m.title, "unit": m.unit} for m in MEASURES},
        "machines": [_machine_as_json(part) for part in comparison.machines],
        "configurations": [_row_as_json(row) for row in comparison.rows],
        "notes": list(comparison.notes),
    }


def _claim(claim: Claim) -> dict[str, Any]:
    part = claim.part
    return {
        "kind": claim.kind.name,
        "about": claim.kind.value,
        "group": part.work if part else "",
        "machine": part.machine.letter if part else "",
        "measure": claim.measure.key,
        "rows": [
            {"configuration": row.variant.label, "factors": dict(row.variant.factors),
             **claim.numbers(row)}
            for row in claim.rows
        ],
    }  # fmt: skip


def as_csv(comparison: Comparison) -> str:
    """Return CSV with one line per run: configuration, factors, outcome and every measure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys = [measure.key for measure in MEASURES]
    heading = ["configuration", "row", "machine", *comparison.factors, "seed", "repeat", "outcome",
               "reason", *keys, "run"]  # fmt: skip
    writer.writerow(map(_escape_formula, heading))
    for row in comparison.rows:
        factors = [row.variant.factors.get(key, "") for key in comparison.factors]
        for entry in row.variant.entries:
            numbers = [entry.measures.get(key, "") for key in keys]
            cells = (row.variant.label, entry.row, row.variant.machine, *factors, *entry.repeat,
                     entry.outcome, entry.reason, *numbers, entry.folder or "")  # fmt: skip
            writer.writerow(map(_escape_formula, cells))
    return printable(text.getvalue(), colours=False)


def _escape_formula(cell: object) -> object:
    """Escape text that a spreadsheet would read as a formula, also after white space.

    https://owasp.org/www-community/attacks/CSV_Injection
    """
    if isinstance(cell, str) and cell.lstrip().startswith(tuple("=+-@\uff1d\uff0b\uff0d\uff20")):
        return f"'{cell}"
    return cell


def _machine_as_json(part: MachineComparison) -> dict[str, Any]:
    return {
        "letter": part.machine.letter,
        "group": part.work,
        "differing": list(part.keys),
        "compared_by": part.focus.value,
        "speed": part.speed.key,
        "facts": part.machine.facts,
        "hosts": list(part.machine.hosts),
        "baseline": part.baseline.label if part.baseline else None,
        "equal_time_s": part.equal_time_s,
        "effects": [_fields(effect) for effect in part.effects],
        "alone": [{"configuration": r.variant.label, "changes": each} for r, each in part.alone],
        "ladder": [
            {"configuration": r.variant.label, "adds": added, "ratios": _ratios(r.ratios)}
            for r, added in part.ladder
        ],
        "beside": [
            {
                **{k: getattr(b.table, k) for k in ("source", "hardware", "date", "baseline")},
                "rows": [
                    {"row": row.row, "ratios": _ratios(row.measured),
                     "published_ratios": dict(row.published)}
                    for row in b.rows
                ],
            }
            for b in part.published
        ],
    }  # fmt: skip


def _row_as_json(row: ComparisonRow) -> dict[str, Any]:
    variant = row.variant
    same = ("is_baseline", "on_front", "loss_at_equal_time", "prediction_error",
            "step_prediction_error")  # fmt: skip
    return {
        "configuration": variant.label,
        "row": variant.row,
        "machine": variant.machine,
        "group": variant.work,
        "factors": dict(variant.factors),
        "outcomes": variant.outcomes,
        **{key: getattr(row, key) for key in same},
        "estimates": {key: asdict(value) for key, value in row.estimates.items()},
        "ratios": _ratios(row.ratios),
        "loss": _fields(row.quality),
        "phases": dict(row.phases),
        "runs": [
            {
                **dict(zip(("seed", "repeat"), entry.repeat, strict=True)),
                **{key: getattr(entry, key) for key in ("outcome", "reason", "rule", "measures")},
                "overrides": list(entry.overrides),
                "folder": str(entry.folder) if entry.folder else None,
            }
            for entry in variant.entries
        ],
    }


def _ratios(ratios: Mapping[str, Ratio | None]) -> dict[str, Any]:
    return {key: _fields(value) for key, value in ratios.items() if value}


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, with members of enumerations as their values."""
    return asdict(
        value,
        dict_factory=lambda pairs: {k: v.value if isinstance(v, Enum) else v for k, v in pairs},
    )


def render_page(comparison: Comparison, repeats: bool = False) -> str:
    """Render the page, with its data embedded as JSON and shown as text."""
    from jinja2 import Environment  # not needed for other formats

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {
        "separators": (",", ":"), "ensure_ascii": False, "allow_nan": False
    }  # fmt: skip
    files = resources.files("eke.results.report.show")
    template, style, script = (
        files.joinpath(f"page.{end}").read_text(encoding="utf-8") for end in ("html", "css", "js")
    )
    parts, notes = groups(comparison), list(comparison.notes)
    drawn = [charts(comparison, each.part) if each.part else [] for each in parts]
    vega = vega_script() if any(drawn) else ""
    if any(drawn) and not vega:
        drawn, notes = [[] for _ in parts], [*notes, "no charts: vl_convert failed"]
    specs = [chart.spec for each in drawn for chart in each]
    tables = [table_data(comparison, each.rows) for each in parts]
    number = iter(range(len(specs)))
    page = environment.from_string(template).render(
        title=report_title(comparison),
        verdict=verdict_lines(comparison),
        command=winner_command(comparison),
        measured=measured(comparison),
        method=METHOD,
        style=style,
        script=script,
        vega=vega,
        groups=[
            {"heading": part.heading,
             "charts": [{**vars(chart), "number": next(number)} for chart in each]}
            for part, each in zip(parts, drawn, strict=True)
        ],
        data=json_safe({"specs": specs, "tables": tables}),
        problems=problems(comparison),
        sections=sections(comparison, repeats),
        provenance=provenance(comparison),
        notes=notes,
    )  # fmt: skip
    return printable(page, colours=False)


def table_data(comparison: Comparison, rows: Sequence[ComparisonRow]) -> dict[str, Any]:
    """Return rows with all columns: cells and sort keys."""
    shown = columns(comparison, rows, with_all=True)
    return {
        "columns": [
            {"title": c.title, "number": c.value is not None, "help": c.help, "main": c.is_main}
            for c in shown
        ],
        "rows": [
            {
                "cells": [_cell(column.cell(row)) for column in shown],
                "values": [_round_for_page(column.value and column.value(row)) for column in shown],
                "full": row.variant.label,
                "class": "baseline" if row.is_baseline else "" if row.variant.records else "bad",
            }
            for row in rows
        ],
    }


def _round_for_page(value: float | None) -> float | None:
    """Round to six digits, which shortens the page."""
    return value and float(f"{value:.6g}")


def _cell(cell: Cell) -> str | list[str]:
    """Return a cell's text, or text, second line and tone if it has them."""
    note = " · ".join(filter(None, [cell.interval, cell.value]))
    return [cell.text, note, cell.tone] if note or cell.tone else cell.text


def vega_script() -> str:
    """Return the script that sets `window.vegaEmbed`, from a cache, or "" if `vl_convert` fails."""
    version = metadata.version("vl-convert-python")
    path = cache_folder() / "report" / f"vega-embed-{version}.js"
    try:
        script = read_text(path)
    except (OSError, ValueError):
        bundle = "import vl_convert; print(vl_convert.javascript_bundle())"
        command = [sys.executable, SAFE_PATH, "-X", "utf8", "-c", bundle]
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:  # its V8 ends a process with too little address space
            return ""
        script = done.stdout.decode()
        with suppress(OSError):  # not cached
            make_private_dir(path.parent)
            write_atomic(path, script)
    # These strings would end the script element.
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def render_markdown(comparison: Comparison, repeats: bool = False) -> str:
    """Render the report as Markdown, with names and errors escaped."""
    first, *others = verdict_lines(comparison)
    lines = [escape(report_title(comparison)), "", f"**{escape(first)}**", ""]
    lines += [text for line in others for text in (escape(line), "")]
    # GitHub truncates a comment at 65,536 characters.
    lines += [*main_table(comparison, max_rows=200), "", escape(measured(comparison)), ""]
    shown = [*problems(comparison), *sections(comparison, repeats), provenance(comparison)]
    for section in shown:
        lines += [f"### {escape(section.title)}", "", *_table(section.head, section.rows), ""]
        lines += [escape(section.note), ""] if section.note else []
    lines += [f"- {escape(note)}" for note in comparison.notes]
    return "\n".join(lines).rstrip() + "\n"


def main_table(comparison: Comparison, max_rows: int, max_chars: int | None = None) -> list[str]:
    """Return the lines of Markdown tables with one row per configuration."""
    lines: list[str] = []
    for each in groups(comparison):
        shown = columns(comparison, each.rows)
        cells = [[column.cell(row).line() for column in shown] for row in each.rows]
        lines += [f"#### {escape(each.heading)}", ""] if each.heading else []
        lines += [*_table([c.title for c in shown], cells, max_rows, max_chars), ""]
    return lines[:-1]


def _table(
    head: Sequence[str], rows: Lines, max_rows: int | None = None, max_chars: int | None = None
) -> list[str]:
    """Return the lines of a Markdown table with escaped cells."""
    cells = [[escape(cut(cell, max_chars)) for cell in row] for row in rows[:max_rows]]
    lines = [list(map(escape, head)), ["---"] * len(head), *cells]
    more = len(rows) - len(cells)
    rest = ["", f"... and {more} more rows: in report.csv"] if more else []
    return [*(f"| {' | '.join(line)} |" for line in lines), *rest]


def cut(text: str, limit: int | None) -> str:
    """Cut a text to at most `limit` characters."""
    return text if limit is None or len(text) <= limit else f"{text[: limit - 1]}…"
