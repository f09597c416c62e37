"""Sweeps as eke leaves them, whose runs know what W&B would know of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eke.common.paths import RunPaths, SweepPaths
from eke.config.schema import Config
from eke.config.schema.codec import make_converter
from eke.plan.record import (
    Loss,
    MeasuredMemory,
    MemoryRecord,
    Record,
    Throughput,
    metrics,
    write_record,
)

SWEEP = "sweep-0123456789ab"


@dataclass(frozen=True)
class Made:
    """One run to be made up."""

    precision: str
    seed: int = 0
    speed: float = 100.0
    group: str | None = SWEEP
    outcome: str = "ok"
    project: str = "eke"
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Key path -> value."""
    row: str = ""


def make_sweep(folder: Path, runs: Sequence[Made], named: str = SWEEP) -> Path:
    """Runs, and beside them the folder of their sweep."""
    cells = []
    for number, run in enumerate(runs):
        identity = f"{number:016x}"
        make_run(folder / identity, run)
        cell = {"overrides": typed(run), "run_id": identity, "folder": str(folder / identity)}
        cells.append({**cell, "outcome": run.outcome, "row": run.row})
    paths = SweepPaths(folder / named)
    paths.folder.mkdir(parents=True)
    paths.sweep.write_text(json.dumps({"schema_version": 1, "command": ["-m"], "cells": cells}))
    return paths.folder


def make_run(folder: Path, run: Made) -> Path:
    """One run's folder: its record, and three steps."""
    paths = RunPaths(folder)
    folder.mkdir(parents=True)
    config = make_converter().unstructure(Config())
    config["seed"], config["precision"]["option"] = run.seed, run.precision
    config["tracker"].update(group=run.group, project=run.project)
    for path, value in run.keys.items():
        group, _, key = path.partition(".")
        config[group][key] = value
    record = Record(
        run_id=folder.name,
        name=" ".join(typed(run)),
        outcome=run.outcome,
        exit_code=0 if run.outcome == "ok" else 1,
        attempt=0,
        steps_done=3,
        config=config,
        choices={"precision": run.precision, "optimizer": "adamw"},
        overrides=typed(run),
        plan={"device": {"name": "GPU"}, "data_fingerprint": "d"},
        machine={"device": "GPU"},
        environment={"host": "h"},
        command=[],
        throughput=Throughput(samples_per_s=run.speed),
        memory=MemoryRecord(measured=MeasuredMemory("made up", 2**20)),
        loss=Loss(eval_final=2.0),
    )
    write_record(paths, record)
    metrics.append_rows(
        paths.metrics,
        [
            {"train/global_step": n, "attempt": 0, "train/loss": 1 / n, "train/step_time_s": 0.5}
            for n in (1, 2, 3)
        ],
    )
    return folder


def typed(run: Made) -> list[str]:
    """What was typed for it."""
    keys = [f"{key}={value}" for key, value in run.keys.items()]
    return [f"precision={run.precision}", *keys, f"seed={run.seed}"]


def three_repeats(**changes: Any) -> list[Made]:
    """Two precisions, three times each."""
    speeds = {"fp32": 100.0, "bf16": 220.0}
    return [
        Made(precision, seed, speed + seed, **changes)
        for precision, speed in speeds.items()
        for seed in range(3)
    ]
