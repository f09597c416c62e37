"""Published results for rows of named sweeps, one YAML file per table.

The files have only figures printed in their source; none was measured by eke.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml


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


@cache
def all_published() -> tuple[PublishedTable, ...]:
    """All tables, sorted by name; tests/unit/results/report/test_published.py checks the files."""
    return tuple(_read(file) for file in sorted(Path(__file__).parent.glob("*.yaml")))


def _read(file: Path) -> PublishedTable:
    content = yaml.safe_load(file.read_text())
    rows = {name: Figures(**figures) for name, figures in content.pop("rows").items()}
    return PublishedTable(name=file.stem, rows=rows, **content)
