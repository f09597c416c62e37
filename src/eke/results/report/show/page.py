"""HTML report: one file that works offline, with charts and a sortable table."""

import json
from importlib import resources
from typing import Any

from eke.results.report.compare import Comparison
from eke.results.report.compare.claims import verdict_lines
from eke.results.report.compare.comparison import MARKS
from eke.results.report.show.charts import charts
from eke.results.report.show.export import vega_script
from eke.results.report.show.sections import columns, count_outcomes, provenance, sections


def render_page(comparison: Comparison, repeats: bool = False) -> str:
    """Render the page; data are embedded as JSON and shown as text."""
    from jinja2 import Environment  # not needed for other formats

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    pictures = charts(comparison)
    return environment.from_string(_part("page.html")).render(
        title=", ".join(comparison.sweeps) or "comparison",
        verdict=verdict_lines(comparison),
        counts=count_outcomes(comparison),
        marks=MARKS,
        style=_part("page.css"),
        script=_part("page.js"),
        vega=vega_script() if pictures else "",
        pictures=[(title, note) for title, note, _ in pictures],
        data=as_script_data(
            {"specs": [spec for _, _, spec in pictures], "table": table_data(comparison)}
        ),
        sections=[*sections(comparison, repeats), provenance(comparison)],
        notes=comparison.notes,
    )


def table_data(comparison: Comparison) -> dict[str, Any]:
    """The main table: texts and sort keys of each row."""
    shown = columns(comparison)
    return {
        "columns": [
            {"title": c.title, "number": c.is_number, "help": c.help} for c in shown
        ],
        "rows": [
            {
                "texts": [column.text(row) for column in shown],
                "values": [_sortable(column.value(row)) for column in shown],
                "full": row.variant.label,
                "class": "baseline" if row.is_baseline else "front" if row.on_front else
                "" if row.variant.records else "bad",
            }
            for row in comparison.rows
        ],
    }  # fmt: skip


def as_script_data(value: Any) -> str:
    """JSON for a script element, with `<` escaped."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _sortable(value: float | None) -> float | None:
    """Round to six digits, to shorten the page."""
    return None if value is None else float(f"{value:.6g}")


def _part(name: str) -> str:
    return resources.files("eke.results.report.show").joinpath(name).read_text(encoding="utf-8")
