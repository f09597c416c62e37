"""Finished runs as observations of the time model, and step times from work and rates.

One file per comparable group, one line per run. Errors never stop a run or a plan. A file twice as
long as allowed is cut, and may lose a line that another run adds at that moment.

Kernels of one device run in sequence, so their times add up. The host launches kernels ahead, so it
only counts if it takes longer than the device. Transfers during the passes are hidden fully, partly
or not at all. Published models of this kind are off by 5 to 15 % with rates measured on the same
machine (vTrain, arXiv:2312.12391: 8.4 %). This one uses datasheets until runs have calibrated it.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import cattrs

from eke.common.files import (
    append_line,
    make_private_dir,
    read_text,
    terminate_last_line,
    write_atomic,
)
from eke.config.schema.codec import make_converter
from eke.data.sources import cache_folder
from eke.estimate.memory.trace_client import digest_of, memory_fingerprint, software
from eke.estimate.time.flops import Work
from eke.estimate.time.memory_traffic import Product
from eke.estimate.time.rates import (
    COLLECTIVE_S,
    DISK,
    HOST_UPDATE_S,
    LAUNCH_S,
    STEP_PARTS,
    TRAINER_S,
    ZERO_SPAN,
    Rates,
    Span,
    StepTime,
    Unknown,
    highest,
    rates_of,
)
from eke.hardware import usable_cores
from eke.plan.planner import Plan
from eke.plan.record import Outcome, Record, metrics

_CACHE_RELEASE = Span(0.0, 0.1, 0.2)
"""Share of a step for releasing cached memory: about 10 % by transformers' docstring of
`torch_empty_cache_steps`. Twice that is an assumption."""


def calibrated_step_time(
    plan: Plan, work: Work | None = None, correction: Span | None = None
) -> StepTime | Unknown:
    """Return the time by datasheets and published efficiencies, corrected by finished runs."""
    rates = rates_of(plan)
    if rates is None:
        return Unknown(why_unknown(plan))
    work = work or Work(plan)
    parts, step = _composed(plan, work, rates)
    if correction is not None:
        step = correction * step.expected
        parts = {name: seconds * correction.expected for name, seconds in parts.items()}
    basis = "datasheet rates and published efficiencies"
    return describe_step(plan, work, step, parts, basis, rates.peak)


def why_unknown(plan: Plan) -> str:
    """Return why there is no estimate, and the remedy, in one line."""
    if plan.device.kind == "cpu":
        return "a CPU has no datasheet rates, so 5 finished runs here are needed"
    what = "compute format" if plan.device.peak_flops else "device"
    return f"no datasheet rates for this {what}, so 5 finished runs on it are needed"


def _composed(plan: Plan, work: Work, rates: Rates) -> tuple[dict[str, float], Span]:
    """Return the expected seconds of each part, and the step's."""
    products = sum([_product_s(each, rates) for each in work.products], ZERO_SPAN)
    traffic = work.moved.over(rates.memory)
    device = products + traffic
    host = work.launches.by(LAUNCH_S)
    if plan.config.engine.is_trainer:
        host = host + TRAINER_S * plan.batch.accumulation
    # The host launches kernels while the device computes, so the slower one decides.
    passes = highest(device, host)
    updated = work.updates.moved.over(rates.memory) + rates.optimizer.inverse(work.updates.flops)
    update = highest(updated, LAUNCH_S * work.updates.launches)
    busy = passes + update
    sent = rates.link.inverse(work.moves.exchanged) + COLLECTIVE_S * work.moves.collectives
    moved = rates.host.inverse(work.moves.to_host) + DISK.inverse(work.moves.to_disk)
    hosted = HOST_UPDATE_S * work.moves.on_host
    sent_shown, moved_shown = _not_hidden(sent, passes), _not_hidden(moved, passes)
    step = busy + sent_shown + moved_shown + hosted
    if plan.config.memory.empty_cache_every:
        step = step + step.by(_CACHE_RELEASE) * (1 / plan.config.memory.empty_cache_every)
    waits = (passes.expected - device.expected) + (update.expected - updated.expected)
    parts = {
        "compute": products.expected,
        "memory": traffic.expected,
        "optimizer": updated.expected,
        "host": waits,
        "transfers": moved_shown.expected + hosted.expected,
        "communication": sent_shown.expected,
    }
    return parts, step


def _not_hidden(sent: Span, passes: Span) -> Span:
    """Return the visible time of transfers during passes: hidden fully, half, or not at all."""
    hidden = max(0.0, sent.low - passes.low)
    expected = (max(0.0, sent.expected - passes.expected) + sent.expected) / 2
    return Span(min(hidden, expected), expected, max(expected, sent.high))


def _product_s(product: Product, rates: Rates) -> Span:
    """Return the seconds of a product: of its operands or of its FLOPs, the longer one."""
    rate = rates.attention if product.fused else rates.tensor
    if product.kind == "linear" and rates.float8 is not None:
        rate = rates.float8
    return highest(rate.inverse(product.flops), rates.memory.inverse(product.moved))


def describe_step(
    plan: Plan, work: Work, step: Span, parts: Mapping[str, float], basis: str, peak: float | None
) -> StepTime:
    """Return the estimate that follows from the seconds of a step. `peak`: datasheet FLOP/s."""
    devices = plan.batch.world_size * plan.batch.devices
    samples = plan.batch.samples_per_step
    flops, mfu = plan.size.flops_per_sample, None
    if flops and peak:
        needed = flops * samples / plan.batch.world_size
        mfu = step.inverse(needed / (peak * plan.batch.devices))
    whole = step * plan.steps.total
    return StepTime(
        step_s=step,
        samples_per_s=step.inverse(samples),
        tokens_per_s=step.inverse(work.tokens * plan.batch.world_size),
        parts={name: seconds for name, seconds in parts.items() if seconds > 0},
        limit=STEP_PARTS[max(parts, key=lambda name: parts[name])],
        mfu=mfu,
        total_s=whole,
        gpu_hours=whole * (devices / 3600),
        basis=basis,
        notes=work.notes,
    )


SOURCES = ("estimate", "models", "training")
"""Packages of eke that predict or run the timed step. Their changes invalidate observations."""

_FEWEST_STEPS = 3
"""Least number of timed steps of an observation."""

_LARGEST_RATIO = 1000.0
"""Largest ratio of measured to predicted time of a step that was not interrupted."""

_FOLDER = "EKE_CALIBRATION"
"""Environment variable with the folder of the files, by default in the cache folder."""

KEPT_LINES = 200
"""Number of newest runs kept in a group."""

_LONGEST_FILE = 4 * 2**20
"""Largest file that is read, in bytes."""

_Group = dict[str, Any]


@dataclass(frozen=True, eq=False)  # hashable: `fitted_rates` is cached by its runs
class Observation:
    """One finished run."""

    key: str
    """Key of its plan's work. One configuration is one observation."""
    run_id: str
    amounts: dict[str, float]
    """Work of its step: FLOPs by format, bytes moved, launches."""
    predicted: float
    """Expected seconds by datasheets, without correction. 0 without a datasheet."""
    measured: float
    """Median seconds of one optimizer step."""

    @property
    def is_plausible(self) -> bool:
        """True if its values are plausible."""
        numbers = (self.predicted, self.measured, *self.amounts.values())
        if not (self.key and self.run_id and all(math.isfinite(n) and n >= 0 for n in numbers)):
            return False
        ratio = self.measured / (self.predicted or self.measured or math.inf)
        return 1 / _LARGEST_RATIO < ratio < _LARGEST_RATIO


def amounts_of(plan: Plan, work: Work) -> dict[str, float]:
    """Return the work of a step, by kinds proportional to time."""
    linear = sum(each.flops for each in work.products)
    operands = sum(each.moved for each in work.products)
    return {
        plan.compute.matmul: float(linear + work.updates.flops),
        "moved": float(operands + work.moved.expected + work.updates.moved.expected),
        "launches": float(work.launches.expected + work.updates.launches),
    }


def time_group(plan: Plan) -> _Group:
    """Return the properties that runs must share for comparable speeds."""
    config = plan.config
    return {
        "about": "pace",
        "device": plan.device.name,
        "kind": plan.device.kind,
        "cores": usable_cores() if plan.device.kind == "cpu" else 0,
        "processes": plan.batch.world_size * plan.batch.devices,
        "distributed": plan.ranks.option,
        "offload": config.offload.option,
        "compile": config.compile.option,
        "engine": config.engine.option,
        **software(SOURCES),
    }


def work_key(plan: Plan) -> str:
    """Return a key that is equal for plans with the same work per step."""
    data = plan.config.data
    lengths = [getattr(data, name, None) for name in ("lengths", "min_len", "median_len", "sigma")]
    return digest_of({
        **memory_fingerprint(plan),
        "tf32": plan.compute.tf32,
        "lengths": [str(value) for value in lengths],
    })  # fmt: skip


def path_of(group: _Group) -> Path:
    """Return the file of a group."""
    own = os.environ.get(_FOLDER)
    folder = Path(own) if own else cache_folder() / "calibration"
    return folder / f"{digest_of(group)}.jsonl"


def record_step_time(plan: Plan, record: Record) -> None:
    """Store a finished run's step time if its speed is meaningful and the file is writable."""
    steps = record.timing.steady_step_s
    if record.outcome != Outcome.ok.value or steps is None or steps.n < _FEWEST_STEPS:
        return
    # A run with another clock began with an older eke.
    if record.shared_device or plan.probe or record.timing.clock != metrics.WALL:
        return
    work = Work(plan)
    prior = calibrated_step_time(plan, work)
    predicted = prior.step_s.expected if isinstance(prior, StepTime) else 0.0
    amounts = amounts_of(plan, work)
    found = Observation(work_key(plan), record.run_id, amounts, predicted, steps.median)
    if found.is_plausible:
        add_line(path_of(time_group(plan)), json.dumps(asdict(found)))


def add_line(path: Path, line: str) -> None:
    """Append a line to a group's file and keep it within bounds. Ignore failures."""
    try:
        make_private_dir(path.parent)
        terminate_last_line(path)
        append_line(path, line)
        lines = read_text(path, _LONGEST_FILE).splitlines()
        if len(lines) > 2 * KEPT_LINES:
            write_atomic(path, "\n".join(lines[-KEPT_LINES:]) + "\n")
    except OSError:
        return


def read_observations(group: _Group) -> tuple[Observation, ...]:
    """Return a group's observations, newest last, one per configuration, () if unreadable."""
    path = path_of(group)
    try:
        found = path.stat()
        return _observations(path, found.st_mtime_ns, found.st_size)
    except OSError:
        return ()


@lru_cache(maxsize=64)  # called for each job of a sweep, cached until the file changes
def _observations(path: Path, changed_ns: int, size: int) -> tuple[Observation, ...]:
    lines = read_text(path, _LONGEST_FILE).splitlines()
    found = [each for line in lines if (each := _parsed(line)) is not None]
    return tuple({each.key: each for each in found}.values())[-KEPT_LINES:]


def _parsed(line: str) -> Observation | None:
    try:
        found = make_converter().structure(json.loads(line), Observation)
    except (ValueError, TypeError, AttributeError, RecursionError, cattrs.BaseValidationError):
        return None
    return found if found.is_plausible else None
