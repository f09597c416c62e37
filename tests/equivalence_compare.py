"""Comparing curves."""

from typing import Any

from eke.plan.record import metrics

Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def largest_difference(first: Curve, second: Curve) -> float:
    """Largest relative difference in loss or gradient norm at any step."""
    assert len(first) == len(second)
    return max(
        abs(a - b) / max(abs(a), abs(b), 1e-12)
        for one, other in zip(first, second, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def curve(job: Any) -> Curve:
    """Loss and gradient norm of each step of a training that has ended."""
    rows, _ = metrics.read_rows(job.paths.metrics)
    latest = metrics.latest(rows, metrics.LOSS)
    return [(row[metrics.LOSS], row["train/grad_norm"]) for row in latest]
