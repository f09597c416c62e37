"""Measures of a record. Quantities that were not measured are absent."""

import math
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from eke.plan.record import Record, table
from eke.plan.record.metrics import is_lower_better


@dataclass(frozen=True)
class Measure:
    """Quantity in which configurations are compared."""

    key: str
    """Path in the record, if any."""
    title: str
    unit: str
    is_speed: bool
    """True if it is invalid on a shared device."""

    @property
    def is_loss(self) -> bool:
        """True for a loss, or a metric of evaluations."""
        return self.key.startswith(BY_SEED)


SAMPLE_SPEED = Measure("throughput.samples_per_s", "samples/s", "1/s", True)
TOKEN_SPEED = Measure("throughput.tokens_per_s", "tokens/s", "1/s", True)
STEP_TIME = Measure("timing.steady_step_s.median", "step", "s", True)
MFU = Measure("throughput.mfu_frac", "MFU", "fraction", True)
PEAK = Measure("memory.measured.peak_allocated_bytes", "peak memory", "bytes", False)
RESERVED = Measure("memory.measured.peak_reserved_bytes", "reserved", "bytes", False)
_RESIDENT = Measure("memory.measured.process_peak_bytes", "process peak", "bytes", False)
PREDICTED = Measure("memory.predicted.allocated_bytes", "predicted", "bytes", False)
PREDICTED_STEP = Measure("timing.predicted_step_s.expected", "predicted step", "s", False)
EVAL_LOSS = Measure("loss.eval_final", "eval loss", "nats per target", False)
TRAIN_LOSS = Measure("loss.train_final", "train loss", "nats per target", False)
LOSSES = (EVAL_LOSS.key, TRAIN_LOSS.key)
LOSS_NAMES = {"loss": LOSSES, "eval_loss": LOSSES[:1], "train_loss": LOSSES[1:]}
"""Name for `--by` -> keys, in order of preference."""
METRIC = "metrics."
"""Prefix of the keys of an evaluation's metrics."""
BY_STEP = (SAMPLE_SPEED.key, TOKEN_SPEED.key, STEP_TIME.key, MFU.key)
"""Keys of measures that follow from the time of a step."""
BY_SEED = (*LOSSES, METRIC)
"""Prefixes of measures that the seed determines: repeats of a seed are one observation."""

_STARTUP = Measure("timing.startup_s", "start-up", "s", True)
_COMPILE = Measure("timing.compile_s", "compiling", "s", True)
DEVICE_HOURS = Measure("device_hours", "device-hours", "h", True)

MEASURES = (
    SAMPLE_SPEED, TOKEN_SPEED, STEP_TIME, MFU, PEAK, RESERVED, _RESIDENT, PREDICTED, PREDICTED_STEP,
    EVAL_LOSS, TRAIN_LOSS, _STARTUP, _COMPILE, DEVICE_HOURS,
)  # fmt: skip


LARGEST = 1e60
"""Limit of measured values, and of their inverses: larger squares would overflow."""


def measured_values(record: Record) -> dict[str, float]:
    """Return the value of each measure by key, within LARGEST. Only losses and metrics may be <= 0.

    Speeds of a run on a shared device are absent, since other processes affect them.
    """
    values: dict[str, Any] = {}
    for measure in MEASURES:  # None if a part of the path is absent
        part: Any = record
        for name in measure.key.split("."):
            part = getattr(part, name, None)
        values[measure.key] = part
    if (seconds := record.timing.train_s) is not None:
        values[DEVICE_HOURS.key] = seconds * num_devices(record) / 3600
    if record.shared_device:
        values |= dict.fromkeys((measure.key for measure in MEASURES if measure.is_speed), None)
    values |= {f"{METRIC}{name}": value for name, value in record.metrics.items()}
    return {
        key: float(value) for key, value in values.items()
        if isinstance(value, int | float)
        and (1 / LARGEST < abs(value) < LARGEST or value == 0)
        and (value > 0 or key.startswith(BY_SEED))
    }  # fmt: skip


def metric_of(key: str) -> Measure:
    """Return the measure of a loss or of an evaluation's metric, by its key."""
    if key in LOSSES:
        return EVAL_LOSS if key == EVAL_LOSS.key else TRAIN_LOSS
    name = key.removeprefix(METRIC)
    title = {"f1_macro": "macro F1"}.get(name, name)
    return Measure(key, title, "of the last evaluation, or the best", False)


def keys_by(by: str) -> tuple[str, ...]:
    """Return the keys of a value of `--by`, in order of preference: a loss, or a metric."""
    return LOSS_NAMES.get(by or "loss", (f"{METRIC}{by}",))


def is_better_lower(key: str) -> bool:
    """Return whether a lower value of a loss or a metric is better."""
    return key in LOSSES or is_lower_better(key.removeprefix(METRIC))


def best_of(key: str, record: Record) -> tuple[str, int]:
    """Return the metric that selected a record's evaluation, and the number of evaluations.

    Empty and 1 for the last evaluation, and for the training loss.
    """
    every = table(record.config, "train").get("eval_every")
    if record.best is None or key == TRAIN_LOSS.key or not isinstance(every, int):
        return "", 1
    count = math.ceil(record.steps_done / every)
    return (record.best.metric, count) if count > 1 else ("", 1)


def num_devices(record: Record) -> int:
    """Return the number of devices that a run trained on."""
    return math.prod(_count(record, key) or 1 for key in ("world_size", "devices"))


def samples_seen(record: Record) -> float | None:
    """Return the training samples of the whole run, or None if the plan lacks them."""
    samples = samples_per_step(record)
    return None if samples is None else float(samples) * record.steps_done


def samples_per_step(record: Record) -> int | None:
    """Return the samples of an optimizer step on all devices, or None if the plan lacks them."""
    size, times = (_count(record, key) for key in ("per_device", "accumulation"))
    return None if size is None or times is None else size * times * num_devices(record)


def _count(record: Record, key: str) -> int | None:
    found = table(record.plan, "batch").get(key)
    return found if isinstance(found, int) else None


def ended_s(record: Record) -> float | None:
    """Return when a run ended, in seconds since 1970, or None if unknown."""
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(str(record.environment.get("time"))).timestamp()
    return None
