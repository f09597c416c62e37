"""Published results for rows of named sweeps: one YAML file per table, not measured by eke."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Figures:
    """Published figures of one row, or None if the source lacks them."""

    samples_per_s: float | None = None
    steps_per_s: float | None = None
    runtime_s: float | None = None
    """Seconds from the first step to the last."""
    peak_memory_mb: float | None = None
    """Peak per GPU, in units of 2^20 bytes, as the notes define it."""
    diff_frac: float | None = None
    """Relative speed difference from the baseline: 0.27 is 27 % faster."""
    train_loss: float | None = None
    """Mean loss over the training."""


@dataclass(frozen=True)
class PublishedTable:
    """Published table."""

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
    notes: str
    """Method of measurement, and missing figures."""
    rows: Mapping[str, Figures]
    """Row of the sweep -> figures. Rows without figures are absent."""


@cache
def all_published() -> tuple[PublishedTable, ...]:
    """Return all tables, sorted by name."""
    return tuple(_read(file) for file in sorted(Path(__file__).parent.glob("*.yaml")))


def _read(file: Path) -> PublishedTable:
    content = yaml.safe_load(file.read_text())
    rows = {name: Figures(**figures) for name, figures in content.pop("rows").items()}
    return PublishedTable(name=file.stem, rows=rows, **content)
