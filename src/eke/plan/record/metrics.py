"""metrics.jsonl, the truth about the training curve, and what follows: timing, rates, losses.

Appended, never rewritten: one row per optimizer step (`train/...`) and per evaluation (`eval/...`),
with `train/global_step` (steps done) and `attempt`. After a resume the steps since the checkpoint
are done again: readers keep the highest attempt of each step. What was not measured is absent.
"""

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eke.common.files import Refused, append_line, open_to_read, plain
from eke.config.schema import Config, ProblemType
from eke.models.families import is_classification
from eke.plan.record import Best, Loss, Spread, Throughput, Timing

Row = dict[str, Any]

METRICS_LIMIT = 1 << 30
"""Largest file that is read, bytes: three million steps."""

LINE_LIMIT = 1 << 20
"""Longest line that is read as a row, bytes; a row has some 350."""

STEP = "train/global_step"
ATTEMPT = "attempt"
LOSS = "train/loss"
ROUTER_LOSS = "train/router_loss"
"""With its coefficient: of the step's micro-batches the mean, each weighted by its targets."""
GRAD_NORM = "train/grad_norm"
EVAL_LOSS = "eval/loss"
BITS_PER_BYTE = "eval/bits_per_byte"
PERPLEXITY = "eval/perplexity"
"""Exponential of the evaluation loss of a language model; absent where that is infinite."""
TOKEN_ACCURACY = "eval/token_accuracy"
"""Share of the targets that the model thinks most probable, where all logits are there."""
LOWER_IS_BETTER = ("loss", "perplexity", "mae", "mse")
"""Metrics of which the lowest value is the best; `loss/NAME` is one of a mix's source."""
STEP_TIME = "train/step_time_s"
WARMUP = "train/warmup"
"""Present and 1 on steps excluded from every timing: the first ones, and those that compiled."""
SHARED = "train/shared_device"
"""Present and 1 on steps after another run was seen on the device."""
CUT = "train/cut"
"""Number of the cut into ranks and micro-batches, from 1; absent on steps of the run's first."""
SAMPLES = "train/samples"
TOKENS = "train/tokens"
"""Of this step, padding not counted."""
PHASES = ("between", "data", "forward", "backward", "optimizer")
"""`between`: since the end of the step before, unless an evaluation or checkpoint lay there."""
WALL = "wall"
"""Clock of steps that each begin where the one before ended, as a clock on the wall counts them."""

PHASE_KEYS = {phase: f"train/{phase}_time_s" for phase in PHASES}
"""Phase -> row key of the seconds a step spent in it."""

_ENCODE = json.JSONEncoder(allow_nan=False).encode


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows with one unbuffered write; OSError: the disk is full."""
    try:
        lines = [_ENCODE(dict(row)) for row in rows]
    except ValueError:  # some number is not finite
        lines = [_ENCODE(plain(dict(row))) for row in rows]
    if lines:
        append_line(path, "\n".join(lines))


def read_rows(path: Path) -> tuple[list[Row], int]:
    """All rows in file order, and how many lines could not be read (a torn last line after a kill).

    Text that stands for a non-finite number (`"nan"`, `"inf"`) is turned back into it.

    Raises OSError: the file cannot be read, or has more than `METRICS_LIMIT` bytes.
    """
    rows: list[Row] = []
    unreadable = 0
    try:
        descriptor = open_to_read(path)
    except FileNotFoundError:
        return [], 0
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > METRICS_LIMIT:
            raise Refused(f"has more than {METRICS_LIMIT >> 20} MiB", path)
        while line := file.readline(LINE_LIMIT):
            row = parse_row(line.decode(errors="replace"))
            if row is None:
                unreadable += bool(line.strip())
            else:
                rows.append(row)
    return rows, unreadable


def parse_row(line: str) -> Row | None:
    """One line as a row; None when it is torn, or holds anything but numbers: no row of ours."""
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
    raise ValueError(f"{value!r:.30} is no number of a row")


def latest(rows: Iterable[Row], key: str) -> list[Row]:
    """Rows that have `key`, one per step: the highest attempt's, in step order."""
    best: dict[int, Row] = {}
    for row in rows:
        if key in row and STEP in row:
            step = int(row[STEP])
            if step not in best or row.get(ATTEMPT, 0) >= best[step].get(ATTEMPT, 0):
                best[step] = row
    return [best[step] for step in sorted(best)]


def num_missing(path: Path, until: int) -> int:
    """How many of the first `until` steps have no row with a loss."""
    rows, _ = read_rows(path)
    there = {int(row[STEP]) for row in latest(rows, LOSS)}
    return until - len(there & set(range(1, until + 1)))


def spread(values: Sequence[float]) -> Spread | None:
    """Median and the 10th and 90th percentile; None of nothing."""
    if not values:
        return None
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(statistics.median(values), deciles[0], deciles[-1], len(values))


def num_cuts(rows: Sequence[Row]) -> int:
    """In how many ways the run's steps were cut into ranks and micro-batches."""
    return len({row.get(CUT, 0) for row in latest(rows, STEP_TIME)})


def _steady(rows: Sequence[Row]) -> list[Row]:
    """Steps that a speed can be made of: none of a run with several cuts."""
    steady = [row for row in latest(rows, STEP_TIME) if WARMUP not in row]
    return steady if num_cuts(rows) <= 1 else []


def timing(rows: Sequence[Row]) -> Timing:
    """Seconds of steady steps, warm-up steps and phases."""
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
) -> Throughput:
    """Samples and tokens of the steady steps over their time; tokens do not include padding."""
    steady = _steady(rows)
    seconds = sum(row[STEP_TIME] for row in steady)
    if not seconds:
        return Throughput(flops_formula=flops_formula)
    tokens_per_s = sum(row[TOKENS] for row in steady) / seconds
    flops = None if flops_per_token is None else flops_per_token * tokens_per_s / num_devices
    return Throughput(
        samples_per_s=sum(row[SAMPLES] for row in steady) / seconds,
        tokens_per_s=tokens_per_s,
        model_flops_per_s=flops,
        mfu_frac=flops / peak_flops if flops is not None and peak_flops else None,
        flops_formula=flops_formula,
    )


def evaluation_metrics(config: Config) -> tuple[str, ...]:
    """Names of the metrics of an evaluation, without `eval/`."""
    if config.task.problem is ProblemType.regression:
        return "loss", "mae", "mse", "r2", "pearson", "spearman"
    if is_classification(config):
        return "loss", "accuracy", "f1_macro", "f1_micro"
    kernels = config.kernels
    no_logits = kernels.fused_linear_cross_entropy or kernels.sparse_prediction
    if no_logits or config.distributed.option == "dp":
        return "loss", "perplexity"
    return "loss", "perplexity", "token_accuracy"


def is_lower_better(metric: str) -> bool:
    """Whether the lowest value of a metric is the best."""
    return metric.partition("/")[0] in LOWER_IS_BETTER


def best_evaluation(rows: Sequence[Row], metric: str | None, first: int = 1) -> Best | None:
    """The best evaluation by a metric (None has none), the first of equal ones, from `first` on."""
    # Weights before training are no result.
    key, sign = f"eval/{metric}", 1 if is_lower_better(str(metric)) else -1
    counted = [r for r in latest(rows, key) if r[STEP] >= first and math.isfinite(float(r[key]))]
    best = min(counted, key=lambda row: sign * float(row[key]), default=None)
    return None if best is None else Best(str(metric), int(best[STEP]), float(best[key]))


def losses(rows: Sequence[Row]) -> Loss:
    """First and last losses; a value that is not finite stands in metrics.jsonl only."""
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
    """Metrics of the last evaluation without its loss, by name: `accuracy`."""
    last = latest(rows, EVAL_LOSS)[-1:]
    names = [key for row in last for key in row if key not in (EVAL_LOSS, BITS_PER_BYTE)]
    found = {key: _finite(last, key) for key in names if key.startswith("eval/")}
    return {k.removeprefix("eval/"): value for k, value in found.items() if value is not None}


def of_sources(rows: Sequence[Row], sizes: Mapping[str, int | None]) -> dict[str, dict[str, float]]:
    """Samples, epochs and last losses of each source of a mix, of so many samples if known."""
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
