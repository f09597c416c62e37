"""Rows of metrics.jsonl, and timing, rates and losses computed from them.

Rows are only appended: one per optimizer step (`train/...`) and per evaluation (`eval/...`), with
`train/global_step` (steps done) and `attempt`. A resumed run repeats the steps since the
checkpoint, so readers keep the highest attempt of each step. Unmeasured values are absent.
"""

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eke.common.files import UntrustedPathError, append_line, json_safe, open_to_read
from eke.config.schema import Config, CustomTask, ProblemType
from eke.plan.record import Best, Loss, Spread, Throughput, Timing

Row = dict[str, Any]

METRICS_LIMIT = 1 << 30
"""Largest file that is read, bytes: three million steps."""


STEP = "train/global_step"
ATTEMPT = "attempt"
LOSS = "train/loss"
ROUTER_LOSS = "train/router_loss"
"""Router loss times its coefficient: mean over micro-batches, weighted by targets."""
GRAD_NORM = "train/grad_norm"
EVAL_LOSS = "eval/loss"
BITS_PER_BYTE = "eval/bits_per_byte"
PERPLEXITY = "eval/perplexity"
"""Exponential of the evaluation loss of a language model, absent if infinite."""
TOKEN_ACCURACY = "eval/token_accuracy"
"""Fraction of targets with the highest probability, if all logits are computed."""
STEP_TIME = "train/step_time_s"
WARMUP = "train/warmup"
"""1 on steps excluded from timings (the first steps and steps that compiled), else absent."""
SHARED = "train/shared_device"
"""1 on steps after another run was detected on the device, else absent."""
CUT = "train/cut"
"""Number of the division into ranks and micro-batches, absent for the first (0)."""
SAMPLES = "train/samples"
TOKENS = "train/tokens"
"""Tokens of this step without padding."""
PHASES = ("between", "data", "forward", "backward", "optimizer")
"""Phases of a step. `between` starts at the end of the previous step, if nothing came between."""
WALL = "wall"
"""Clock of steps that each begin at the end of the previous step."""

PHASE_KEYS = {phase: f"train/{phase}_time_s" for phase in PHASES}
"""Phase -> key of its seconds in a row."""

_ENCODE = json.JSONEncoder(allow_nan=False).encode


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows with one unbuffered write; OSError if the disk is full."""
    try:
        lines = [_ENCODE(dict(row)) for row in rows]
    except ValueError:  # a number is not finite
        lines = [_ENCODE(json_safe(dict(row))) for row in rows]
    if lines:
        append_line(path, "\n".join(lines))


def read_rows(path: Path) -> tuple[list[Row], int]:
    """Read all rows in file order, and count unreadable lines (incomplete after a kill).

    Texts of non-finite numbers (`"nan"`, `"inf"`) become numbers. OSError if the file is unreadable
    or larger than `METRICS_LIMIT`.
    """
    rows: list[Row] = []
    unreadable = 0
    try:
        descriptor = open_to_read(path)
    except FileNotFoundError:
        return [], 0
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > METRICS_LIMIT:
            raise UntrustedPathError(f"has more than {METRICS_LIMIT >> 20} MiB", path)
        while line := file.readline(1 << 20):  # a row has about 350 bytes
            row = parse_row(line.decode(errors="replace"))
            if row is None:
                unreadable += bool(line.strip())
            else:
                rows.append(row)
    return rows, unreadable


def parse_row(line: str) -> Row | None:
    """Parse a line as a row, None if it is incomplete or has values other than numbers."""
    try:
        row = {key: _number(value) for key, value in json.loads(line).items()}
        return row if math.isfinite(row.get(STEP, 0)) else None
    except (ValueError, RecursionError, AttributeError, TypeError, OverflowError):
        return None


def _number(value: Any) -> int | float:
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    if value in ("nan", "inf", "-inf"):
        return float(value)
    raise ValueError(f"{value!r:.30} is not a number")


def latest(rows: Iterable[Row], key: str) -> list[Row]:
    """Return the rows with `key`, in step order, from the highest attempt of each step."""
    best: dict[int, Row] = {}
    for row in rows:
        if key in row and STEP in row:
            step = int(row[STEP])
            if step not in best or row.get(ATTEMPT, 0) >= best[step].get(ATTEMPT, 0):
                best[step] = row
    return [best[step] for step in sorted(best)]


def num_missing(path: Path, until: int) -> int:
    """Count the steps up to `until` without a loss."""
    rows, _ = read_rows(path)
    there = {int(row[STEP]) for row in latest(rows, LOSS)}
    return until - len(there & set(range(1, until + 1)))


def spread(values: Sequence[float]) -> Spread | None:
    """Return median, 10th and 90th percentile, None without values."""
    if not values:
        return None
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(statistics.median(values), deciles[0], deciles[-1], len(values))


def num_cuts(rows: Sequence[Row]) -> int:
    """Count the different divisions of the run's steps into ranks and micro-batches."""
    return len({row.get(CUT, 0) for row in latest(rows, STEP_TIME)})


def _steady(rows: Sequence[Row]) -> list[Row]:
    """Return the steps for timings, [] for a run with several cuts."""
    steady = [row for row in latest(rows, STEP_TIME) if WARMUP not in row]
    return steady if num_cuts(rows) <= 1 else []


def timing(rows: Sequence[Row]) -> Timing:
    """Compute the seconds of steady steps, warm-up steps and phases."""
    steps, steady = latest(rows, STEP_TIME), _steady(rows)
    phases = {
        p: spread([row[key] for row in steady if key in row]) for p, key in PHASE_KEYS.items()
    }
    seconds = sum(row[STEP_TIME] for row in steady)
    waited = sum(row[PHASE_KEYS["data"]] for row in steady)
    with_gap = [PHASE_KEYS["between"] in row for row in steps]
    return Timing(
        clock=WALL if all(with_gap) else "mixed" if any(with_gap) else None,
        train_s=sum(row[STEP_TIME] for row in steps) if steps else None,
        steady_step_s=spread([row[STEP_TIME] for row in steady]),
        warmup_steps_s=[row[STEP_TIME] for row in steps if WARMUP in row],
        data_frac=waited / seconds if seconds else None,
        phases={name: value for name, value in phases.items() if value},
    )


def throughput(
    rows: Sequence[Row],
    flops_per_token: float | None,
    flops_formula: str,
    num_devices: int,
    peak_flops: float | None,  # one device's datasheet peak in FLOP/s
    flops_per_sample: float | None = None,  # used if samples have no tokens
) -> Throughput:
    """Compute samples, tokens (without padding) and FLOPs per second of the steady steps."""
    steady = _steady(rows)
    seconds = sum(row[STEP_TIME] for row in steady)
    if not seconds:
        return Throughput(flops_formula=flops_formula)
    tokens_per_s = sum(row[TOKENS] for row in steady) / seconds
    samples_per_s = sum(row[SAMPLES] for row in steady) / seconds
    each, rate = flops_per_token, tokens_per_s
    if not tokens_per_s:
        each, rate = flops_per_sample, samples_per_s
    flops = None if each is None else each * rate / num_devices
    return Throughput(
        samples_per_s=samples_per_s,
        tokens_per_s=tokens_per_s or None,
        model_flops_per_s=flops,
        mfu_frac=flops / peak_flops if flops is not None and peak_flops else None,
        flops_formula=flops_formula,
    )


def evaluation_metrics(config: Config) -> tuple[str, ...]:
    """Return the names of an evaluation's metrics without `eval/`."""
    return *_of_task(config), *config.metrics


def _of_task(config: Config) -> tuple[str, ...]:
    if isinstance(config.task, CustomTask):
        return ("loss",)
    if config.task.problem is ProblemType.regression:
        return "loss", "mae", "mse", "r2", "pearson", "spearman"
    if not config.targets.per_token:
        return "loss", "accuracy", "f1_macro", "f1_micro"
    kernels = config.kernels
    no_logits = kernels.fused_linear_cross_entropy or kernels.sparse_prediction
    if no_logits or config.distributed.option == "dp":
        return "loss", "perplexity"
    return "loss", "perplexity", "token_accuracy"


_TITLES = {"f1_macro": "macro F1", "f1_micro": "micro F1", "mae": "mean absolute error"}


def format_metric(name: str, value: float) -> str:
    """Format a metric by its name without `eval/`: `accuracy 0.9500`, `perplexity 30.1`."""
    digits = ".4f" if abs(value) < 1.5 else ".4g"  # shares and correlations have four decimals
    return f"{_TITLES.get(name, name.replace('_', ' '))} {value:{digits}}"


def is_lower_better(metric: str) -> bool:
    """Return whether the lowest value of a metric is the best."""
    name = metric.partition("/")[0]  # `loss/NAME` is the loss of a source
    return name in ("loss", "perplexity", "mae", "mse")


def best_evaluation(rows: Sequence[Row], metric: str | None, first: int = 1) -> Best | None:
    """Return the first best evaluation by a metric from step `first`, None without one."""
    # The initial weights are excluded.
    key, sign = f"eval/{metric}", 1 if is_lower_better(str(metric)) else -1
    counted = [r for r in latest(rows, key) if r[STEP] >= first and math.isfinite(float(r[key]))]
    best = min(counted, key=lambda row: sign * float(row[key]), default=None)
    return None if best is None else Best(str(metric), int(best[STEP]), float(best[key]))


def losses(rows: Sequence[Row]) -> Loss:
    """Return the first and last losses, None for values that are not finite."""
    steps = latest(rows, LOSS)
    evals = latest(rows, EVAL_LOSS)
    last = evals if len(evals) > 1 else []
    return Loss(
        train_first=_finite(steps[:1], LOSS),
        train_final=_finite(steps[-1:], LOSS),
        eval_start=_finite(evals[:1], EVAL_LOSS),
        eval_final=_finite(last[-1:], EVAL_LOSS),
        bits_per_byte_start=_finite(evals[:1], BITS_PER_BYTE),
        bits_per_byte_final=_finite(last[-1:], BITS_PER_BYTE),
    )


def last_evaluation(rows: Sequence[Row]) -> dict[str, float]:
    """Return the metrics of the last evaluation by name (`accuracy`), without loss."""
    last = latest(rows, EVAL_LOSS)[-1:]
    names = [key for row in last for key in row if key not in (EVAL_LOSS, BITS_PER_BYTE)]
    found = {key: _finite(last, key) for key in names if key.startswith("eval/")}
    return {k.removeprefix("eval/"): value for k, value in found.items() if value is not None}


def of_sources(rows: Sequence[Row], sizes: Mapping[str, int | None]) -> dict[str, dict[str, float]]:
    """Return samples, epochs and last losses by source. `sizes`: training samples by source."""
    steps, last, found = latest(rows, LOSS), last_evaluation(rows), {}
    for name, size in sizes.items():
        samples = sum(row.get(f"{SAMPLES}/{name}", 0) for row in steps)
        values = {
            "samples": samples,
            "epochs": samples / size if size else None,
            "train_loss": _finite(latest(rows, f"{LOSS}/{name}")[-1:], f"{LOSS}/{name}"),
            "eval_loss": last.get(f"loss/{name}"),
        }
        found[name] = {key: value for key, value in values.items() if value is not None}
    return found


def _finite(rows: Sequence[Row], key: str) -> float | None:
    value = rows[0].get(key) if rows else None
    return float(value) if value is not None and math.isfinite(value) else None
