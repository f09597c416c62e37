"""What follows from the rows of metrics.jsonl: timing, rates, losses. Absent if not measured."""

import math
import statistics
from collections.abc import Sequence

from eke.plan.record import metrics
from eke.plan.record.record import Loss, Spread, Throughput, Timing


def spread(values: Sequence[float]) -> Spread | None:
    """Median and the 10th and 90th percentile; None of nothing."""
    if not values:
        return None
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(statistics.median(values), deciles[0], deciles[-1], len(values))


def is_steady(row: metrics.Row) -> bool:
    """Whether a step counts for timing."""
    return metrics.WARMUP not in row


def timing(rows: Sequence[metrics.Row]) -> Timing:
    """Seconds of steady steps, warm-up steps and phases."""
    steps = metrics.latest(rows, metrics.STEP_TIME)
    steady = [row for row in steps if is_steady(row)]
    phases = {p: spread([row[metrics.PHASE_KEYS[p]] for row in steady]) for p in metrics.PHASES}
    return Timing(
        train_s=sum(row[metrics.STEP_TIME] for row in steps) if steps else None,
        steady_step_s=spread([row[metrics.STEP_TIME] for row in steady]),
        warmup_steps_s=[row[metrics.STEP_TIME] for row in steps if not is_steady(row)],
        data_frac=waiting_frac(steady),
        phases={name: value for name, value in phases.items() if value},
    )


def waiting_frac(steady: Sequence[metrics.Row]) -> float | None:
    """Share of these steps' time in the phase `data`: no batch was there to compute with."""
    seconds = sum(row[metrics.STEP_TIME] for row in steady)
    waited = sum(row[metrics.PHASE_KEYS["data"]] for row in steady)
    return waited / seconds if seconds else None


def throughput(
    rows: Sequence[metrics.Row],
    flops_per_token: float | None,
    flops_formula: str,
    num_devices: int,
    peak_flops: float | None,
) -> Throughput:
    """Samples and tokens of the steady steps over their time.

    Args:
        rows: of metrics.jsonl.
        flops_per_token: model FLOPs, forward and backward, None when unknown; padding is none.
        flops_formula: how they were computed.
        num_devices: devices that share the work.
        peak_flops: datasheet peak of one device in FLOP/s, None when unknown.
    """
    steady = [row for row in metrics.latest(rows, metrics.STEP_TIME) if is_steady(row)]
    seconds = sum(row[metrics.STEP_TIME] for row in steady)
    if not seconds:
        return Throughput(flops_formula=flops_formula)
    tokens_per_s = sum(row[metrics.TOKENS] for row in steady) / seconds
    flops = None
    if flops_per_token is not None:
        flops = flops_per_token * tokens_per_s / num_devices
    return Throughput(
        samples_per_s=sum(row[metrics.SAMPLES] for row in steady) / seconds,
        tokens_per_s=tokens_per_s,
        model_flops_per_s=flops,
        mfu_frac=flops / peak_flops if flops is not None and peak_flops else None,
        flops_formula=flops_formula,
    )


def losses(rows: Sequence[metrics.Row]) -> Loss:
    """First and last losses; a value that is not finite stands in metrics.jsonl only."""
    steps = metrics.latest(rows, metrics.LOSS)
    evals = metrics.latest(rows, metrics.EVAL_LOSS)
    last = evals if len(evals) > 1 else []
    return Loss(
        train_first=_finite(steps[:1], metrics.LOSS),
        train_final=_finite(steps[-1:], metrics.LOSS),
        eval_start=_finite(evals[:1], metrics.EVAL_LOSS),
        eval_final=_finite(last[-1:], metrics.EVAL_LOSS),
        bits_per_byte_start=_finite(evals[:1], metrics.BITS_PER_BYTE),
        bits_per_byte_final=_finite(last[-1:], metrics.BITS_PER_BYTE),
    )


def _finite(rows: Sequence[metrics.Row], key: str) -> float | None:
    value = rows[0].get(key) if rows else None
    return float(value) if value is not None and math.isfinite(value) else None
