"""How right is the time model? Against published tables, and against trainings on this CPU.

python benchmarks/step_time.py published [--out FILE]
python benchmarks/step_time.py cpu [--count N] [--seed S] [--out FILE]

`published` composes each row of src/eke/results/report/published that prints a speed, as its
libraries of that day would have run it (eager attention, HF Trainer, AdamW tensor by tensor), and
compares. No constant of the model is fitted to these rows: src/eke/estimate/time/rates.py names
where each is from. `cpu` trains random small configurations here, twice, the second time in the
opposite order, fits rates to every other one and predicts those in between, both ways. Others use
this machine, so the truth is the tenth percentile of steps, the lesser of both rounds. Another seed
draws others.
"""

import argparse
import contextlib
import io
import json
import logging
import math
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import forecast_bounds
from arguments import at_least, writable

from eke.common.errors import ConfigError
from eke.common.files import write_atomic
from eke.common.paths import RunPaths
from eke.config.sweep import expand
from eke.estimate.time.flops import Work
from eke.estimate.time.rates import StepTime
from eke.estimate.time.step_time import fitted_rates
from eke.estimate.time.time_history import Observation, amounts_of, calibrated_step_time
from eke.hardware import DEVICES, environment
from eke.plan.planner import Plan
from eke.plan.record import metrics
from eke.results.report.published import PublishedTable, all_published
from eke.workflows.planning import plan_for

REPO = Path(__file__).resolve().parents[1]

OF_THAT_DAY = ("attention=eager", "engine=trainer", "optimizer=adamw_forloop", "compile=none")
"""Libraries of 2021 and 2022: transformers' own attention, and its AdamW, one tensor at a time."""

ASSUMED = "lengths assumed: median 40 tokens of source and target together"

TABLES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "guide_v100": ("v100_16", (), ""),
    "t5_a100": ("a100_40", (), ASSUMED),
    "t5_a100_combined": ("a100_40", (), ASSUMED),
    "t5_batch_a100": ("a100_40", (), f"{ASSUMED}; bf16 assumed"),
    "t5_batch_rtx3090": ("rtx3090", (), f"{ASSUMED}; bf16 assumed"),
    "t5_rtx3090_combined": ("rtx3090", ("batch.per_device=16",), ASSUMED),
    "nvlink_titan_rtx": ("titan_rtx", (), ""),
}
"""Published table -> its hardware, what else it had, and what its source leaves open.
t5_rtx3090_optimizers is left out: neither its batch nor its format is known."""

NUM_DEVICES = {"nvlink_titan_rtx": 2}

STEPS, ROUNDS, WARMUP = 8, 2, 2

Row = dict[str, Any]


def main() -> int:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("published", "cpu"))
    parser.add_argument("--count", type=at_least(12), default=48)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    out = writable(parser, arguments.out or REPO / "results" / f"step_time_{arguments.what}.json")
    if arguments.what == "published":
        content = published()
    else:
        content = on_this_cpu(arguments.count, arguments.seed)
    print(json.dumps(content["summary"], indent=2))
    write_atomic(out, json.dumps(content, indent=1) + "\n")
    return 0


def published() -> dict[str, Any]:
    """Every row with a speed whose configuration is known."""
    rows = [row for table in all_published() if table.name in TABLES for row in rows_of(table)]
    for row in rows:
        print(line_of(row))
    parts = {name: summarised([r for r in rows if r["table"] == name]) for name in TABLES}
    stated = [row for row in rows if not row["assumed"]]
    summary = {"all": summarised(rows), "nothing assumed": summarised(stated), **parts}
    return {"of_that_day": list(OF_THAT_DAY), "summary": summary, "rows": rows}


def rows_of(table: PublishedTable) -> Iterable[Row]:
    """One published table's rows, predicted."""
    option, overrides, assumed = TABLES[table.name]
    device = replace(DEVICES[option], count=NUM_DEVICES.get(table.name, 1))
    many = [text for text in OF_THAT_DAY if device.count == 1 or "engine" not in text]
    typed = [f"sweep={table.sweep}", f"hardware={option}", *overrides, *many]
    typed += ["plan_only=true", "tracker=none"]
    for cell in expand(typed, None, lambda *_: None).cells:
        figures = table.rows.get(cell.row)
        if figures is None or not (figures.samples_per_s or figures.steps_per_s):
            continue
        plan = plan_for(cell.composed, planning=True, target=(device, "as published", 1))
        measured = 1 / figures.steps_per_s if figures.steps_per_s else None
        if measured is None and figures.samples_per_s:
            measured = plan.batch.samples_per_step / figures.samples_per_s
        found = calibrated_step_time(plan)
        assert isinstance(found, StepTime), found
        assert measured is not None
        yield {
            "table": table.name,
            "row": cell.row,
            "assumed": assumed,
            "low": found.step_s.low,
            "expected": found.step_s.expected,
            "high": found.step_s.high,
            "measured": measured,
            "limit": found.limit,
        }


def on_this_cpu(count: int, seed: int) -> dict[str, Any]:
    """Random trainings in two rounds; half of them calibrate, the others are predicted."""
    drawn = draw(count, seed)
    seconds: list[list[float]] = [[] for _ in drawn]
    for turn in range(ROUNDS):
        order = range(len(drawn)) if turn % 2 == 0 else reversed(range(len(drawn)))
        for number in order:
            found = trained(drawn[number][1])
            if found is not None:
                seconds[number].append(found)
    rows = []
    for (overrides, plan), each in zip(drawn, seconds, strict=True):
        if len(each) == ROUNDS:
            rows.append({
                "overrides": overrides, "measured": min(each),
                "rounds": each, "amounts": amounts_of(plan, Work(plan)),
            })  # fmt: skip
    predicted = [*held_out(rows[::2], rows[1::2]), *held_out(rows[1::2], rows[::2])]
    for row in predicted:
        print(line_of(row))
    drift = [abs(math.log(row["rounds"][1] / row["rounds"][0])) for row in rows]
    summary = {
        "held out": summarised(predicted),
        "rounds_differ_median": round(math.expm1(statistics.median(drift)), 4),
    }
    load = [round(value, 1) for value in os.getloadavg()]
    return {"seed": seed, "load": load, "environment": environment(),
            "summary": summary, "rows": predicted}  # fmt: skip


def draw(count: int, seed: int) -> list[tuple[str, Plan]]:
    """So many configurations that no rule refuses."""
    rng, found = Random(seed), []
    while len(found) < count:
        overrides = [text for text in forecast_bounds.draw(rng) if "train.steps" not in text]
        overrides += [f"train.steps={STEPS}", f"train.timing_warmup_steps={WARMUP}"]
        plan = forecast_bounds.planned(overrides)
        if plan is not None:
            drawn = [text for text in overrides if text not in forecast_bounds.FIXED]
            found.append((" ".join(drawn), plan))
    return found


def trained(plan: Plan) -> float | None:
    """Seconds of a steady step of a real training in this process, the fastest tenth's."""
    import torch

    from eke.results.trackers.tracker import Untracked
    from eke.training.loop.attempt import run_engine
    from eke.training.loop.meter import Clock, Meter
    from eke.training.loop.stop import StopFlag
    from eke.training.loop.training_state import TrainingState

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        paths = RunPaths(Path(folder))
        meter = Meter(Clock(), 0, WARMUP)
        try:
            run_engine(TrainingState(plan, paths, 0, StopFlag(), Untracked(), meter, {}))
        except ConfigError:
            return None
        rows, _ = metrics.read_rows(paths.metrics)
    steady = metrics.timing(rows).steady_step_s
    return None if steady is None else steady.p10


def held_out(known: Sequence[Row], asked: Sequence[Row]) -> Iterable[Row]:
    """Predictions of rows that the rates have not seen."""
    runs = (Observation("", "", row["amounts"], 0.0, row["measured"]) for row in known)
    rates = fitted_rates(tuple(runs))
    assert rates is not None, "too few runs"
    for row in asked:
        expected = rates.correction.factor * sum(
            amount * rates.seconds.get(kind, 0.0) for kind, amount in row["amounts"].items()
        )
        within = rates.correction.within
        low, high = expected * math.exp(-within), expected * math.exp(within)
        yield {"table": "cpu", "row": row["overrides"], "assumed": "", "low": low,
               "expected": expected, "high": high, "measured": row["measured"],
               "rounds": row["rounds"]}  # fmt: skip


def line_of(row: Row) -> str:
    """One comparison in a line."""
    inside = "inside " if row["low"] <= row["measured"] <= row["high"] else "OUTSIDE"
    error = row["expected"] / row["measured"] - 1
    low, high = row["low"] / row["measured"], row["high"] / row["measured"]
    return f"{inside} {error:+7.1%} [{low:.2f}, {high:.2f}] {row['table']} {row['row']}"


def summarised(rows: Sequence[Row]) -> dict[str, Any]:
    """How many truths lie in the range, how wide that is, and how far off the expected value is."""
    errors = sorted(abs(row["expected"] / row["measured"] - 1) for row in rows)
    widths = [row["high"] / row["low"] for row in rows]
    bias = [math.log(row["expected"] / row["measured"]) for row in rows]
    return {
        "count": len(rows),
        "inside": sum(row["low"] <= row["measured"] <= row["high"] for row in rows),
        "high_over_low_median": round(statistics.median(widths), 3),
        "error_mean": round(statistics.mean(errors), 4),
        "error_median": round(statistics.median(errors), 4),
        "error_max": round(errors[-1], 4),
        "bias": round(math.exp(statistics.mean(bias)), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
