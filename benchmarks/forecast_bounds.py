"""Does the truth lie within the forecast's bounds? Random small trainings, measured on a CPU.

python benchmarks/forecast_bounds.py [--count N] [--seed S] [--out FILE]

Each configuration is planned, forecast in closed form and really trained for two steps in this
process; the second one's peak of the tensor allocator, as the run's record has it, is compared with
the forecast. Nothing is fitted here: another seed draws other configurations. Prints every one that
lies outside, and the errors' median and extremes; writes all of them to results/.
"""

import argparse
import contextlib
import io
import json
import logging
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from random import Random
from typing import Any

from arguments import at_least, writable

from eke.common.errors import ConfigError
from eke.common.files import write_atomic
from eke.common.paths import RunPaths
from eke.config.compose import compose
from eke.estimate.memory import forecast
from eke.hardware import environment
from eke.plan.planner import Plan
from eke.workflows.planning import plan_for

REPO = Path(__file__).resolve().parents[1]

TASKS = {
    "tiny": ("causal_lm", "causal_lm", "sequence_classification"),
    "tiny_qwen3": ("causal_lm",),
    "tiny_gpt2": ("causal_lm", "causal_lm", "sequence_classification"),
    "tiny_bert": ("masked_lm", "masked_lm", "sequence_classification"),
    "tiny_t5": ("seq2seq_lm", "seq2seq_lm", "sequence_classification"),
    "tiny_moe": ("causal_lm",),
}
"""Option of `model` -> tasks it is drawn with."""

CHOICES: dict[str, tuple[str, ...]] = {
    "precision": ("fp32", "fp32", "bf16", "bf16", "fp16", "bf16_pure"),
    "optimizer": (
        "adamw", "adamw", "adamw_foreach", "adamw_forloop", "adafactor", "adamw_8bit", "lion",
        "sgd", "muon", "schedule_free", "galore", "apollo",
    ),
    "memory": (
        "none", "none", "none", "checkpointing", "checkpointing_selective",
        "optimizer_in_backward",
    ),
    "attention": ("sdpa", "sdpa", "eager"),
    "peft": ("none", "none", "none", "none", "lora", "ia3"),
    "model.hidden_size": ("32", "64", "96", "128", "192"),
    "model.num_hidden_layers": ("1", "2", "3", "5", "8"),
    "model.num_attention_heads": ("1", "2", "4", "8"),
    "model.intermediate_size": ("48", "128", "256", "512", "1024"),
    "model.vocab_size": ("320", "320", "1000", "4000", "12000"),
    "model.dropout": ("0", "0", "0.1"),
    "data.seq_len": ("16", "32", "64", "100", "160"),
    "data.lengths": ("fixed", "fixed", "fixed", "uniform"),
    "batch.per_device": ("1", "2", "4", "8"),
    "batch.accumulation": ("1", "1", "2"),
    "memory.every_n": ("1", "1", "2"),
    "kernels.fused_linear_cross_entropy": ("false", "false", "false", "true"),
    "train.max_grad_norm": ("1.0", "null"),
}  # fmt: skip
"""Key -> values, drawn independently; what rules refuse is drawn anew."""

FIXED = ("data=synthetic", "data.num_samples=32", "data.num_eval_samples=2", "train.steps=2",
         "train.save_final=false", "tracker=none", "hardware=cpu")  # fmt: skip

Row = dict[str, Any]


def main() -> int:
    """Measure, print and write; returns 1 where a truth lies outside of its bounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=at_least(1), default=120)
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--out", type=Path, default=REPO / "results" / "forecast_bounds_cpu.json")
    arguments = parser.parse_args()
    writable(parser, arguments.out)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    rng, rows, skipped = Random(arguments.seed), [], 0
    while len(rows) < arguments.count:
        overrides = draw(rng)
        plan = planned(overrides)
        if plan is None:
            continue
        row = compared(plan, overrides)
        if row["measured"] is None:
            skipped += 1
            continue
        rows.append(row)
        sys.stdout.write(line_of(row) + "\n")
        sys.stdout.flush()
    summary = summarised(rows) | {"without_an_optimizer_step": skipped}
    sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    content = {"seed": arguments.seed, "environment": environment(), **summary, "rows": rows}
    write_atomic(arguments.out, json.dumps(content, indent=1) + "\n")
    return 1 if summary["outside"] else 0


def draw(rng: Random) -> list[str]:
    """Overrides of one configuration."""
    model = rng.choice(list(TASKS))
    drawn = [f"{key}={rng.choice(values)}" for key, values in CHOICES.items()]
    if "optimizer=schedule_free" in drawn:
        drawn.append("schedule=constant")
    return [f"model={model}", f"task={rng.choice(TASKS[model])}", *drawn, *FIXED]


def planned(overrides: list[str]) -> Plan | None:
    """The plan; None where a rule refuses it."""
    try:
        return plan_for(compose([*overrides, "plan_only=true"]), planning=True)
    except ConfigError:
        return None


def compared(plan: Plan, overrides: list[str]) -> Row:
    """Forecast and truth of one configuration, in bytes of tensors."""
    found = forecast(plan).allocated
    drawn = [text for text in overrides if text not in FIXED]
    return {
        "overrides": " ".join(drawn),
        "low": found.low,
        "expected": found.expected,
        "high": found.high,
        "measured": measured(plan),
    }


def measured(plan: Plan) -> int | None:
    """Peak of the tensor allocator in the second step of a real training.

    None where the loss scaler has skipped both steps: there are no optimizer states yet.
    """
    import torch

    from eke.results.trackers.tracker import Untracked
    from eke.training.loop.attempt import run_engine
    from eke.training.loop.meter import Clock, Meter
    from eke.training.loop.stop import StopFlag
    from eke.training.loop.training_state import TrainingState

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        paths = RunPaths(Path(folder))
        meter = Meter(Clock(), 0, 0)
        job = TrainingState(plan, paths, 0, StopFlag(), Untracked(), meter, {})
        run_engine(job)
    stepped = any(job.optimizer.state.values())
    return job.profiled_peak if stepped else None


def is_inside(row: Row) -> bool:
    """Whether the truth lies between the bounds."""
    return bool(row["low"] <= row["measured"] <= row["high"])


def line_of(row: Row) -> str:
    """One configuration in a line."""
    error = row["expected"] / row["measured"] - 1
    verdict = "inside " if is_inside(row) else "OUTSIDE"
    low, high = row["low"] / row["measured"], row["high"] / row["measured"]
    return f"{verdict} {error:+7.1%}  [{low:.2f}, {high:.2f}]  {row['overrides']}"


def summarised(rows: list[Row]) -> dict[str, Any]:
    """How many lie outside, how wide the bounds are, and how far off the expected value is."""
    errors = sorted(abs(row["expected"] / row["measured"] - 1) for row in rows)
    widths = [(row["high"] - row["low"]) / row["measured"] for row in rows]
    return {
        "count": len(rows),
        "outside": sum(not is_inside(row) for row in rows),
        "width_median": round(statistics.median(widths), 3),
        "error_mean": round(statistics.mean(errors), 4),
        "error_median": round(statistics.median(errors), 4),
        "error_p95": round(errors[int(0.95 * (len(errors) - 1))], 4),
        "error_max": round(errors[-1], 4),
    }


if __name__ == "__main__":
    sys.exit(main())
