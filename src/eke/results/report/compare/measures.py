"""Measures of a record; quantities that were not measured are absent."""

import math
from dataclasses import dataclass
from typing import Any

from eke.plan.record import Record, table
from eke.plan.record.metrics import is_lower_better


@dataclass(frozen=True)
class Measure:
    """A quantity in which configurations are compared."""

    key: str
    """Path in the record, if any."""
    title: str
    unit: str
    is_speed: bool
    """Whether it is invalid on a shared device."""


SAMPLES = Measure("throughput.samples_per_s", "samples/s", "1/s", True)
TOKENS = Measure("throughput.tokens_per_s", "tokens/s", "1/s", True)
STEP = Measure("timing.steady_step_s.median", "step", "s", True)
MFU = Measure("throughput.mfu_frac", "MFU", "fraction", True)
PEAK = Measure("memory.measured.peak_allocated_bytes", "peak memory", "bytes", False)
RESERVED = Measure("memory.measured.peak_reserved_bytes", "reserved", "bytes", False)
RESIDENT = Measure("memory.measured.process_peak_bytes", "process peak", "bytes", False)
PREDICTED = Measure("memory.predicted.allocated_bytes", "predicted", "bytes", False)
PREDICTED_STEP = Measure("timing.predicted_step_s.expected", "predicted step", "s", False)
EVAL_LOSS = Measure("loss.eval_final", "eval loss", "nats per target", False)
TRAIN_LOSS = Measure("loss.train_final", "train loss", "nats per target", False)
LOSSES = (EVAL_LOSS.key, TRAIN_LOSS.key)
LOSS_NAMES = {"loss": LOSSES, "eval_loss": LOSSES[:1], "train_loss": LOSSES[1:]}
"""Name for `--by` -> keys, in order of preference."""
METRIC = "metrics."
"""Prefix of the keys of an evaluation's metrics."""
BY_STEP = (SAMPLES.key, TOKENS.key, STEP.key, MFU.key)
"""Keys of what follows from the time of a step."""
BY_SEED = (*LOSSES, METRIC)
"""Beginnings of the keys of what the seed determines: its repeats are one observation."""

STARTUP = Measure("timing.startup_s", "start-up", "s", True)
COMPILE = Measure("timing.compile_s", "compiling", "s", True)
DEVICE_HOURS = Measure("device_hours", "device-hours", "h", True)

MEASURES = (
    SAMPLES, TOKENS, STEP, MFU, PEAK, RESERVED, RESIDENT, PREDICTED, PREDICTED_STEP, EVAL_LOSS,
    TRAIN_LOSS, STARTUP, COMPILE, DEVICE_HOURS,
)  # fmt: skip


LARGEST = 1e60
"""Values above it, or below its inverse, are no measurements: their squares would overflow."""


def measured_values(record: Record) -> dict[str, float]:
    """Key of a measure -> value; within LARGEST, and positive but for losses and metrics.

    Speeds of a run on a shared device are absent, since other processes affect them.
    """
    values = {measure: _value(record, measure.key) for measure in MEASURES}
    if (seconds := record.timing.train_s) is not None:
        values[DEVICE_HOURS] = seconds * num_devices(record) / 3600
    found = {
        measure.key: float(value)
        for measure, value in values.items()
        if isinstance(value, int | float)
        and (_is_usual(value) or (measure.key in LOSSES and _is_finite(value)))
        and not (measure.is_speed and record.shared_device)
    }
    metrics = {f"{METRIC}{name}": value for name, value in record.metrics.items()}
    return found | {key: value for key, value in metrics.items() if _is_finite(value)}


def _is_usual(value: float) -> bool:
    return 1 / LARGEST < value < LARGEST


def _is_finite(value: float) -> bool:
    return value == 0 or _is_usual(abs(value))


def _value(record: Record, path: str) -> Any:
    """What a record has at a path; None where a part of it is absent."""
    part: Any = record
    for name in path.split("."):
        part = getattr(part, name, None)
    return part


def metric_of(key: str) -> Measure:
    """The measure of a loss or of an evaluation's metric, by its key."""
    if key in LOSSES:
        return EVAL_LOSS if key == EVAL_LOSS.key else TRAIN_LOSS
    name = key.removeprefix(METRIC)
    title = {"f1_macro": "macro F1"}.get(name, name)
    return Measure(key, title, "of the last evaluation, or the best", False)


def keys_by(by: str) -> tuple[str, ...]:
    """Keys of what `--by` names, in order of preference: a loss, either loss, or a metric."""
    return LOSS_NAMES.get(by or "loss", (f"{METRIC}{by}",))


def is_better_lower(key: str) -> bool:
    """Whether a lower value of a loss or a metric is better."""
    return key in LOSSES or is_lower_better(key.removeprefix(METRIC))


def best_of(key: str, record: Record) -> tuple[str, int]:
    """Metric by which a record's evaluation was chosen as the best, and of how many.

    Empty and 1 for the last one, and for the training loss.
    """
    every = table(record.config, "train").get("eval_every")
    if record.best is None or key == TRAIN_LOSS.key or not isinstance(every, int):
        return "", 1
    count = math.ceil(record.steps_done / every)
    return (record.best.metric, count) if count > 1 else ("", 1)


def num_devices(record: Record) -> int:
    """Devices that a run trained on."""
    counts = [_count(record, key) for key in ("world_size", "devices")]
    return math.prod(count for count in counts if count is not None)


def samples_seen(record: Record) -> float | None:
    """Training samples of the whole run; None if the plan lacks them."""
    samples = samples_per_step(record)
    return None if samples is None else float(samples) * record.steps_done


def samples_per_step(record: Record) -> int | None:
    """Training samples of an optimizer step on all devices; None if the plan lacks them."""
    size, times = (_count(record, key) for key in ("per_device", "accumulation"))
    return None if size is None or times is None else size * times * num_devices(record)


def _count(record: Record, key: str) -> int | None:
    found = table(record.plan, "batch").get(key)
    return found if isinstance(found, int) else None
