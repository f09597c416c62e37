"""What others have published of the named sweeps' rows, to be shown beside what was measured.

One YAML file a table, with the figures that its source prints and no others. Nothing here was
measured by eke.
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
    """What a source prints of one row; None is what it does not print."""

    samples_per_s: float | None = None
    """Training samples per second."""
    steps_per_s: float | None = None
    """Optimizer steps per second."""
    runtime_s: float | None = None
    """Seconds from the first step to the last."""
    peak_memory_mb: float | None = None
    """Of each GPU, in units of 2^20 bytes; what is counted, the notes say."""
    diff_frac: float | None = None
    """Speed relative to the baseline's, less one: 0.27 is 27 % faster."""
    train_loss: float | None = None
    """Mean over the training."""


@dataclass(frozen=True)
class Published:
    """One table."""

    name: str
    """The file's."""
    title: str
    source: str
    """URL."""
    hardware: str
    date: str
    """Of the measurement, or the edition that has it."""
    sweep: str
    """The named sweep whose rows these are."""
    baseline: str
    """The row that others are compared with."""
    notes: str
    """How the numbers were obtained, and what is missing."""
    rows: Mapping[str, Figures]
    """Row of the sweep -> its figures; rows without any are absent."""


def published_for(sweep: str) -> tuple[Published, ...]:
    """The tables about a named sweep, in the order of their names; none for the empty name.

    Args:
        sweep: the option of the group `sweep`.

    Raises:
        EkeError: a file cannot be read; says which, and what is wrong with it.
    """
    return tuple(table for table in all_published() if table.sweep == sweep)


@cache
def all_published() -> tuple[Published, ...]:
    """Every table, in the order of their names.

    Raises:
        EkeError: a file cannot be read; says which, and what is wrong with it.
    """
    return tuple(read_published(file) for file in sorted(FOLDER.glob("*.yaml")))


def read_published(file: Path) -> Published:
    """One table.

    Raises:
        EkeError: it cannot be read; says what is wrong with it.
    """
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise EkeError(f"{file}: cannot be read ({str(error).splitlines()[0]})") from error
    problem = _problem(content)
    if problem:
        raise EkeError(f"{file}: {problem}")
    rows = {name: Figures(**figures) for name, figures in content["rows"].items()}
    return Published(**{**content, "name": file.stem, "rows": rows})


_TEXTS = tuple(f.name for f in fields(Published) if f.name not in ("name", "rows"))
_FIGURES = tuple(f.name for f in fields(Figures))


def _problem(content: Any) -> str:
    """What is wrong with a file's content; empty for nothing."""
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
