"""Trainings in this process, compared step by step."""

from collections.abc import Callable
from pathlib import Path

import pytest

from eke.paths import RunPaths
from eke.record import metrics
from eke.track import TrackedRun, build_tracker

Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


@pytest.fixture
def curve_of(make_plan, tmp_path: Path) -> Callable[..., Curve]:
    """Overrides -> what the run logs at each step."""
    from eke.run.job import build_job
    from eke.run.loop import train
    from eke.run.meter import HostClock, Meter
    from eke.run.stop import StopFlag

    def run(*overrides: str) -> Curve:
        plan = make_plan(*overrides)
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}-{plan.run_id}"
        folder.mkdir()
        paths = RunPaths(folder)
        tracker = build_tracker(
            TrackedRun("0" * 16, "", None, (), "", {}, {}, folder, 0, plan.config.tracker)
        )
        meter = Meter(HostClock(), 0, 0)
        train(build_job(plan, paths, 0, StopFlag(), tracker, meter, {}))
        rows, unreadable = metrics.read_rows(paths.metrics)
        assert unreadable == 0
        steps = metrics.latest(rows, metrics.LOSS)
        assert len(steps) == plan.steps.total
        return [(row[metrics.LOSS], row["train/grad_norm"]) for row in steps]

    return run


def largest_difference(first: Curve, second: Curve) -> float:
    """Largest relative difference in loss or gradient norm at any step."""
    assert len(first) == len(second)
    return max(
        abs(a - b) / max(abs(a), abs(b), 1e-12)
        for one, other in zip(first, second, strict=True)
        for a, b in zip(one, other, strict=True)
    )
