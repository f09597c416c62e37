"""Sweeps as eke leaves them, whose runs know what W&B would know of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unit.results.report import made
from unit.results.report.made import SWEEP, Run


def tracked(
    precision: str,
    seed: int = 0,
    speed: float = 100.0,
    group: str | None = SWEEP,
    project: str = "eke",
    keys: Mapping[str, Any] | None = None,
) -> Run:
    """One run to be made up, with its place at W&B."""
    keys = keys or {}
    words = [f"{key}={value}" for key, value in keys.items()]
    return Run(
        {"precision": precision},
        seed=seed,
        speed=speed,
        keys={**keys, "tracker.group": group, "tracker.project": project},
        overrides=(f"precision={precision}", *words, f"seed={seed}"),
    )


def make_sweep(
    folder: Path, runs: Sequence[Run], identity: str = SWEEP, rows: Sequence[str] = ()
) -> Path:
    """Runs of three steps, and beside them the folder of their sweep."""
    return made.make_sweep(folder, runs, rows, identity=identity, curve=(1.0, 0.5, 0.25))


def three_repeats(**changes: Any) -> list[Run]:
    """Two precisions, three times each."""
    speeds = {"fp32": 100.0, "bf16": 220.0}
    return [
        tracked(precision, seed, speed + seed, **changes)
        for precision, speed in speeds.items()
        for seed in range(3)
    ]
