"""A comparison for machines: report.json holds all that is shown, report.csv one line a run."""

import csv
import io
from dataclasses import asdict
from enum import Enum
from typing import Any

from eke.results.report.compare import Comparison, OneMachine, Row
from eke.results.report.compare.effects import Effect
from eke.results.report.compare.load_records import Entry
from eke.results.report.compare.measures import MEASURES, PEAK, SAMPLES, measured
from eke.results.report.compare.published_effects import PublishedRow
from eke.results.report.compare.statistics import Ratio
from eke.results.report.compare.verdict import verdict

REPORT_VERSION = 1
"""Raise it when a field of report.json changes its meaning or disappears."""


def as_plain(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON's types; memory in bytes, times in seconds."""
    return {
        "schema_version": REPORT_VERSION,
        "verdict": verdict(comparison),
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
    """One line a run: configuration, factors, outcome and every measure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys = [measure.key for measure in MEASURES]
    heading = ["configuration", "row", "machine", *comparison.factors, "seed", "repeat", "outcome",
               "reason", *keys, "run"]  # fmt: skip
    writer.writerow(map(_inert, heading))
    for row in comparison.rows:
        for entry in row.variant.entries:
            values = measured(entry.record) if entry.record else {}
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
    """Text that a spreadsheet takes for text, also behind white space and in full width.

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
             "baseline": b.table.baseline, "rows": [_beside(row) for row in b.rows]}
            for b in part.beside
        ],
    }  # fmt: skip


def _beside(row: PublishedRow) -> dict[str, Any]:
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


def _row(row: Row) -> dict[str, Any]:
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
        "measures": measured(entry.record) if entry.record else {},
    }


def _ratios(ratios: Any) -> dict[str, Any]:
    return {key: _named(asdict(value)) for key, value in ratios.items() if isinstance(value, Ratio)}


def _named(plain: dict[str, Any]) -> dict[str, Any]:
    return {key: value.value if isinstance(value, Enum) else value for key, value in plain.items()}
