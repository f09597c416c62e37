"""What eke logs, by the names under which W&B's panels find it."""

from collections.abc import Mapping
from typing import Any

from eke.plan.record import Record, metrics
from eke.results.report.compare import Comparison
from eke.results.report.wandb.place import recorded
from eke.results.trackers.train_time import TIME as TIME

SAMPLES_PER_S, PEAK_BYTES = "samples_per_s", "peak_allocated_bytes"
"""Of a run's summary (eke.results.trackers.describe)."""
STEP, LOSS = metrics.STEP, metrics.LOSS
"""Of its rows, as is TIME."""

MAX_FACTORS = 6
"""W&B nests its groups; beyond so many, runs are shown one by one. A choice, no limit of W&B's."""


def factor_paths(comparison: Comparison) -> list[str]:
    """Paths in W&B's config of the factors that differ, `precision.value`.

    Factors of cells that never ran alone are left out: no run at W&B has them.
    """
    records = [record for _, record in recorded(comparison)]
    paths = [path for key in comparison.factors if (path := _path(key, records))]
    return list(dict.fromkeys(paths))


def grouping(comparison: Comparison) -> list[str]:
    """What runs are grouped and coloured by; nothing where too much differs."""
    paths = factor_paths(comparison)
    return paths if len(paths) <= MAX_FACTORS else []


def _path(key: str, records: list[Record]) -> str:
    """`precision` is a scalar at the top, `optimizer.lr` lies under `cfg`; else nothing.

    W&B wraps each top-level key into `value`.
    """
    if any(key in record.choices for record in records):
        return (
            f"{key.replace('.', '_')}.value"  # as eke.results.trackers.wandb.make_config names it
        )
    if any(_has(record.config, key) for record in records):
        return f"cfg.value.{key}"
    return ""


def _has(tree: Mapping[str, Any], path: str) -> bool:
    *parents, name = path.split(".")
    for parent in parents:
        branch = tree.get(parent)
        if not isinstance(branch, Mapping):
            return False
        tree = branch
    return name in tree
