"""One configuration on every known device: the guides' choice of a GPU."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from eke.common.text_table import align
from eke.common.units import GIB, format_number
from eke.estimate.memory.best_forecast import calibrated
from eke.estimate.memory.predict import forecast
from eke.estimate.memory.values import Forecast, Method, Verdict
from eke.plan.planner import Plan

LARGEST_BATCH = 65536
"""Where the search for a micro-batch ends."""

NUMBERS = (1, 3, 4, 5, 6)
"""Columns of the table that hold them; the others hold words."""


@dataclass(frozen=True)
class OnDevice:
    """One configuration on one device."""

    option: str
    """Of `hardware`."""
    memory_bytes: int | None
    forecast: Forecast | None
    """None where a rule refuses the configuration there."""
    batch: int
    """Largest micro-batch whose high forecast has room; 0 where none has."""
    reason: str = ""
    """Why it is refused."""
    speed: str = ""
    """Expected samples per second, as a range; empty where they are not known."""
    speed_runs: int = 0
    """Finished runs that `speed` is corrected by."""
    per_device: int = 0
    """Micro-batch of the forecast: what was typed, or what batch=auto has chosen."""


def largest_batch(plan: Plan) -> int:
    """The largest micro-batch of which even the high forecast has room; 0 where none has."""
    low, high = 0, 1
    while high <= LARGEST_BATCH and _fits(plan, high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(plan, middle) else (low, middle)
    return low


def _fits(plan: Plan, size: int) -> bool:
    batch = replace(plan.batch, per_device=size, eval_per_device=size)
    sized = replace(plan, batch=batch)
    return calibrated(sized, forecast(sized)).verdict is Verdict.fits


def compare_devices(
    plans: Mapping[str, Plan],
    forecasts: Mapping[str, Forecast],
    refused: Mapping[str, tuple[int | None, str]],
    speeds: Mapping[str, tuple[str, int]] | None = None,
) -> list[OnDevice]:
    """Forecasts of one configuration, the smallest memory first.

    Args:
        plans: option of `hardware` -> the plan for it.
        forecasts: option -> what is known of that plan's memory.
        refused: option -> memory, and why a rule refuses the configuration there.
        speeds: option -> expected samples per second, in words, and the finished runs that they
            are corrected by.
    """
    rows = []
    for option, plan in plans.items():
        found, size = forecasts[option], plan.batch.per_device
        speed, runs = (speeds or {}).get(option, ("", 0))
        # A trace may know that there is room where formulas, which the search is by, do not.
        known = size if found.verdict is Verdict.fits else 0
        largest = max(known, largest_batch(plan))
        memory = plan.device.memory_bytes
        rows.append(OnDevice(option, memory, found, largest, "", speed, runs, size))
    rows += [
        OnDevice(option, memory, None, 0, reason) for option, (memory, reason) in refused.items()
    ]
    return sorted(rows, key=lambda row: row.memory_bytes or 0)


def render_devices(
    rows: Sequence[OnDevice], per_device: int | None, target: int, count: int = 1
) -> str:
    """One line a device, at most 80 columns.

    Args:
        rows: as compared.
        per_device: the micro-batch typed; None where batch=auto has chosen one for each device.
        target: samples per optimizer step that batch=auto has kept.
        count: devices of the run.
    """
    last = "micro-batch"
    head = ("hardware", "GiB", "verdict", "expected", "of it", "samples/s", last)
    table = align([head, *(_cells(row, per_device is None) for row in rows)], NUMBERS)
    typed = f"batch.per_device={per_device}" if per_device else f"batch=auto batch.target={target}"
    lines = [f"{format_number(count, 'device')} each, {typed}", ""]
    lines += [f"  {line}" for line in table]
    what = "the largest with which even the highest forecast has room"
    if per_device is None:
        what = "the largest with room that keeps the samples per step"
    lines += [
        "",
        f"  {last}: {what}",
        f"  samples/s: of {'all' if count > 1 else 'one'} with batch.per_device, an estimate",
        *(_filled(text) for text in _sources(rows)),
    ]
    for row in rows:
        if row.reason:
            lines.append(_filled(f"{row.option}: {row.reason}"))
    return "\n".join(lines)


def _sources(rows: Sequence[OnDevice]) -> list[str]:
    """Where memory was traced, and which numbers finished runs have corrected."""
    known = [(row, row.forecast) for row in rows if row.forecast is not None]
    traced = [row.option for row, found in known if found.method is not Method.closed_form]
    words = f"; traced: {', '.join(traced)}" if traced else ""
    lines = [f"expected: by formulas{words}" if len(traced) < len(known) else "expected: traced"]
    corrected = []
    for row, found in known:
        by = found.calibrated
        if by is not None and by.peak is not None:
            corrected.append(f"{row.option} memory ({by.num_runs} runs)")
        if row.speed_runs:
            corrected.append(f"{row.option} samples/s ({row.speed_runs} runs)")
    few = "not calibrated: no device has finished runs enough"
    return [*lines, f"calibrated: {', '.join(corrected)}" if corrected else few]


def _filled(text: str) -> str:
    return textwrap.fill(text, 80, initial_indent="  ", subsequent_indent="    ")


def _cells(row: OnDevice, chosen: bool) -> tuple[str, ...]:
    memory = f"{row.memory_bytes / GIB:.1f}" if row.memory_bytes else "?"
    if row.forecast is None:
        return row.option, memory, "refused", "", "", "", ""
    peak = row.forecast.best.expected
    share = f"{peak / row.memory_bytes:.0%}" if row.memory_bytes else ""
    batch = str(row.batch) if row.batch else "none"
    if chosen:
        batch = str(row.per_device) if row.forecast.verdict is Verdict.fits else "none"
    size, word = f"{peak / GIB:.1f} GiB", row.forecast.verdict.value
    return row.option, memory, word, size, share, row.speed, batch
