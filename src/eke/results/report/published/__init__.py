"""Published results for rows of named sweeps, one YAML file per table.

The files have only figures printed in their source; none was measured by eke.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from eke.common.errors import EkeError

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Figures:
    """Published figures of one row; None where the source has none."""

    samples_per_s: float | None = None
    """Training samples per second."""
    steps_per_s: float | None = None
    """Optimizer steps per second."""
    runtime_s: float | None = None
    """Seconds from the first step to the last."""
    peak_memory_mb: float | None = None
    """Per GPU, in units of 2^20 bytes; the notes say what is counted."""
    diff_frac: float | None = None
    """Relative speed difference from the baseline: 0.27 is 27 % faster."""
    train_loss: float | None = None
    """Mean over the training."""


@dataclass(frozen=True)
class PublishedTable:
    """One table."""

    name: str
    """File name without suffix."""
    title: str
    source: str
    """URL."""
    hardware: str
    date: str
    """Date of the measurement or of the source."""
    sweep: str
    """Named sweep with these rows."""
    baseline: str
    """Row of the baseline."""
    notes: str
    """Method of measurement, and missing figures."""
    rows: Mapping[str, Figures]
    """Row of the sweep -> figures; rows without figures are absent."""


def published_for(sweep: str) -> tuple[PublishedTable, ...]:
    """Tables of a named sweep, sorted by name; none for an empty name.

    Args:
        sweep: the option of the group `sweep`.

    Raises:
        EkeError: a file cannot be read; says which, and what is wrong with it.
    """
    return tuple(table for table in all_published() if table.sweep == sweep)


@cache
def all_published() -> tuple[PublishedTable, ...]:
    """All tables, sorted by name.

    Raises:
        EkeError: a file cannot be read; says which, and what is wrong with it.
    """
    return tuple(read_table(file) for file in sorted(FOLDER.glob("*.yaml")))


def read_table(file: Path) -> PublishedTable:
    """Read one table.

    Raises:
        EkeError: the file is invalid.
    """
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise EkeError(f"{file}: cannot be read ({str(error).splitlines()[0]})") from error
    problem = _problem(content)
    if problem:
        raise EkeError(f"{file}: {problem}")
    rows = {name: Figures(**figures) for name, figures in content["rows"].items()}
    return PublishedTable(**{**content, "name": file.stem, "rows": rows})


_TEXTS = tuple(f.name for f in fields(PublishedTable) if f.name not in ("name", "rows"))
_FIGURES = tuple(f.name for f in fields(Figures))


def _problem(content: Any) -> str:
    """Error in a file's content; empty if valid."""
    if not isinstance(content, dict):
        return "is no mapping"
    wanted = {*_TEXTS, "rows"}
    for key in (*sorted(map(str, content.keys() - wanted)), *sorted(wanted - content.keys())):
        return f"{key} is {'missing' if key in wanted else f'unknown; known: {_names(wanted)}'}"
    for key in _TEXTS:
        if not isinstance(content[key], str) or not content[key]:
            return f"{key} is {content[key]!r}; a text is wanted"
    if not content["source"].startswith("https://"):
        return f"source is {content['source']!r}; a URL is wanted"
    return _problem_of_rows(content["rows"], content["baseline"])


def _problem_of_rows(rows: Any, baseline: str) -> str:
    if not isinstance(rows, dict) or not rows:
        return "rows is no mapping from the sweep's rows to their figures"
    if baseline not in rows:
        return f"baseline is {baseline!r}, of which rows has nothing"
    for row, figures in rows.items():
        if not isinstance(figures, dict) or not figures:
            return f"rows.{row} has no figures"
        for key, value in figures.items():
            if key not in _FIGURES:
                return f"rows.{row}.{key} is unknown; known: {_names(_FIGURES)}"
            if not _is_number(value):
                return f"rows.{row}.{key} is {value!r}; a number is wanted"
    return ""


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _names(names: Any) -> str:
    return ", ".join(sorted(names))
