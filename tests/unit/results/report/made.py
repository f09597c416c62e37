"""Run folders as eke leaves them, without a training: what a report is made from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from eke.common.paths import RunPaths, SweepPaths
from eke.config.schema import Config
from eke.config.schema.codec import make_converter
from eke.plan.record import (
    Failure,
    Loss,
    MeasuredMemory,
    MemoryRecord,
    PredictedMemory,
    PredictedStep,
    Record,
    Spread,
    Throughput,
    Timing,
    write_record,
)
from eke.results.report.compare import compare_runs

MIB = 2**20
MACHINE = {"device": "GPU", "device_count": "1", "torch": "2.13.0", "eke_source": "a"}
STEPS, PER_STEP = 100, 8
NOISE = (1.0, 1.01, 0.99)


@dataclass(frozen=True)
class Run:
    """One run to be made up."""

    choices: Mapping[str, str] = field(default_factory=dict)
    """Group -> option; the others have eke's defaults."""
    repeat: int = 0
    seed: int = 0
    speed: float | None = 100.0
    """Samples per second."""
    peak: int | None = 100 * MIB
    loss: float | None = 2.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last evaluation."""
    outcome: str = "ok"
    reason: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Key path -> value."""
    machine: Mapping[str, str] = field(default_factory=lambda: MACHINE)
    shared: bool | None = None
    clock: str | None = "wall"
    steps: int = STEPS
    predicted_step: float | None = None
    """Expected over measured seconds of a step; None where the time model said nothing."""
    overrides: tuple[str, ...] | None = None
    per_device: int = PER_STEP
    accumulation: int = 1
    tokens: float = 256.0
    """Of a sample."""
    data: str = "d"
    """Fingerprint of the data."""
    train_s: float | None = None
    """None: of all steps."""

    @property
    def typed(self) -> tuple[str, ...]:
        """What made it."""
        if self.overrides is not None:
            return self.overrides
        pairs = {**self.choices, **self.keys, "seed": self.seed, "repeat": self.repeat}
        return tuple(f"{key}={value}" for key, value in pairs.items())


def make_run(folder: Path, run: Run, curve: Sequence[float] = ()) -> Path:
    """Write its record, and the losses of its steps."""
    paths = RunPaths(folder)
    folder.mkdir(parents=True, exist_ok=True)
    run_id, _, _ = folder.name.partition("-")  # of ID-2, too
    write_record(paths, make_record(run_id, run))
    if curve:
        rows = [
            {"train/global_step": n + 1, "attempt": 0, "train/loss": loss, "train/step_time_s": 0.5}
            for n, loss in enumerate(curve)
        ]
        paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


SWEEP = "sweep-0123456789ab"


def make_sweep(
    folder: Path,
    runs: Sequence[Run],
    rows: Sequence[str] = (),
    name: str = "",
    identity: str = SWEEP,
    curve: Sequence[float] = (),
) -> Path:
    """Runs, and the file of the sweep that they belong to; refused ones have no folder."""
    cells = []
    for number, run in enumerate(runs):
        run_id = f"{number:016x}"
        refused = run.outcome in ("refused", "skipped")
        waiting = run.outcome == "not run"
        if not refused and not waiting:
            make_run(folder / run_id, run, curve)
        cells.append(
            {
                "overrides": list(run.typed),
                "run_id": "" if refused else run_id,
                "folder": "" if refused or waiting else str(folder / run_id),
                "outcome": "" if waiting else run.outcome,
                "reason": run.reason,
                "reused": False,
                "row": rows[number] if rows else "",
                "round": run.repeat,
            }
        )
    paths = SweepPaths(folder / identity)
    paths.folder.mkdir(parents=True)
    content = {"schema_version": 1, "directory": "/", "command": ["-m", "precision=fp32,bf16"],
               "name": name, "cells": cells}  # fmt: skip
    paths.sweep.write_text(json.dumps(content))
    return paths.folder


def make_record(identity: str, run: Run) -> Record:
    """The record of a made-up run."""
    choices = {"model": "tiny", "task": "causal_lm", "precision": "fp32", "optimizer": "adamw",
               "memory": "none", "batch": "fixed", "attention": "sdpa", **run.choices}  # fmt: skip
    config = json.loads(_plain_config())
    for group, option in choices.items():
        config[group]["option"] = option
    config["seed"], config["repeat"] = run.seed, run.repeat
    for path, value in run.keys.items():
        group, _, key = path.partition(".")
        config[group][key] = value
    return Record(
        run_id=identity,
        name=" ".join(run.typed),
        outcome=run.outcome,
        exit_code=0 if run.outcome == "ok" else 1,
        attempt=0,
        steps_done=run.steps,
        config=config,
        choices=choices,
        overrides=list(run.typed),
        plan={
            "batch": {
                "per_device": run.per_device,
                "accumulation": run.accumulation,
                "world_size": 1,
                "devices": 1,
            },
            "steps": {"total": STEPS},
            "data_fingerprint": run.data,
        },
        machine=dict(run.machine),
        environment={"time": "2026-11-01T00:00:00+00:00", "host": "h", "git": {"commit": "c" * 40}},
        command=["python", "train.py", *run.typed],
        timing=_timing(run),
        throughput=Throughput(
            samples_per_s=run.speed, tokens_per_s=run.speed and run.tokens * run.speed
        ),
        memory=_memory(run),
        loss=Loss(eval_final=run.loss, train_final=run.loss),
        metrics=dict(run.metrics),
        failure=Failure("forward", run.reason) if run.reason else None,
        shared_device=run.shared,
    )


def _timing(run: Run) -> Timing:
    if not run.speed:
        return Timing(clock=run.clock)
    step = PER_STEP / run.speed
    return Timing(
        clock=run.clock,
        startup_s=3.0,
        train_s=run.steps * step if run.train_s is None else run.train_s,
        steady_step_s=Spread(step, step, step, run.steps),
        predicted_step_s=_predicted_step(run, step),
        phases={"forward": Spread(step / 3, 0, 0, 1), "backward": Spread(2 * step / 3, 0, 0, 1)},
    )


def _predicted_step(run: Run, step: float) -> PredictedStep | None:
    if run.predicted_step is None:
        return None
    expected = run.predicted_step * step
    return PredictedStep(expected / 2, expected, 2 * expected)


def _memory(run: Run) -> MemoryRecord:
    if run.peak is None:
        return MemoryRecord()
    return MemoryRecord(
        PredictedMemory(run.peak // 2, run.peak, 2 * run.peak, allocated_bytes=run.peak),
        MeasuredMemory("made up", run.peak),
    )


@cache
def _plain_config() -> str:
    return json.dumps(make_converter().unstructure(Config()))


def repeated(choices, speed=100.0, rounds=3, **other):
    """Three repeats whose speeds differ by a per cent."""
    return [Run(choices, repeat=n, speed=speed * NOISE[n % 3], **other) for n in range(rounds)]


def compared(tmp_path, runs, rows=(), **options):
    return compare_runs([make_sweep(tmp_path, runs, rows)], **options)


def by_label(comparison):
    return {row.variant.label: row for row in comparison.rows}
