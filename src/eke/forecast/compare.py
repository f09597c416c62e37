"""One configuration on every known device: the guides' choice of a GPU."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from eke.forecast.predict import forecast
from eke.forecast.values import Forecast, Verdict
from eke.plan import Plan
from eke.units import GIB

LARGEST_BATCH = 65536
"""Where the search for a micro-batch ends."""


@dataclass(frozen=True)
class OnDevice:
    """One configuration on one device."""

    option: str
    """Of `hardware`."""
    name: str
    memory_bytes: int | None
    forecast: Forecast | None
    """None where a rule refuses the configuration there."""
    batch: int
    """Largest micro-batch whose high forecast has room; 0 where none has."""
    reason: str = ""
    """Why it is refused."""
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
    return forecast(replace(plan, batch=batch)).verdict is Verdict.fits


def compare_devices(
    plans: Mapping[str, Plan], refused: Mapping[str, tuple[str, int | None, str]]
) -> list[OnDevice]:
    """Forecasts of one configuration, the smallest memory first.

    Args:
        plans: option of `hardware` -> the plan for it.
        refused: option -> name, memory and why a rule refuses the configuration there.
    """
    rows = [
        OnDevice(option, plan.device.name, plan.device.memory_bytes, forecast(plan),
                 largest_batch(plan), per_device=plan.batch.per_device)
        for option, plan in plans.items()
    ]  # fmt: skip
    rows += [
        OnDevice(option, name, memory, None, 0, why)
        for option, (name, memory, why) in refused.items()
    ]
    return sorted(rows, key=lambda row: row.memory_bytes or 0)


def render_devices(rows: Sequence[OnDevice], per_device: int | None, target: int) -> str:
    """One line a device, at most 80 columns.

    Args:
        rows: as compared.
        per_device: the micro-batch typed; None where batch=auto has chosen one for each device.
        target: samples per optimizer step that batch=auto has kept.
    """
    last = "largest micro-batch" if per_device else "batch.per_device"
    head = ("hardware", "GiB", "verdict", "expected", "of it", last)
    table = [head, *(_cells(row, per_device is None) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    typed = f"batch.per_device={per_device}" if per_device else f"batch=auto batch.target={target}"
    lines = [f"one device each, {typed}", ""]
    for line in table:
        cells = [f"{line[0]:<{widths[0]}}", f"{line[1]:>{widths[1]}}", f"{line[2]:<{widths[2]}}"]
        cells += [f"{line[n]:>{widths[n]}}" for n in (3, 4, 5)]
        lines.append("  ".join(["", *cells]).rstrip())
    what = "with which even the highest forecast has room"
    if per_device is None:
        what = "the largest with room that keeps the samples per step"
    lines += ["", f"  {last}: {what}"]
    for row in rows:
        if row.reason:
            text = f"{row.option}: {row.reason}"
            lines.append(textwrap.fill(text, 80, initial_indent="  ", subsequent_indent="    "))
    return "\n".join(lines)


def _cells(row: OnDevice, chosen: bool) -> tuple[str, ...]:
    memory = f"{row.memory_bytes / GIB:.1f}" if row.memory_bytes else "?"
    if row.forecast is None:
        return row.option, memory, "refused", "", "", ""
    peak = row.forecast.peak.expected
    share = f"{peak / row.memory_bytes:.0%}" if row.memory_bytes else ""
    batch = str(row.batch) if row.batch else "none"
    if chosen:
        batch = str(row.per_device) if row.forecast.verdict is Verdict.fits else "none"
    return row.option, memory, row.forecast.verdict.value, f"{peak / GIB:.1f} GiB", share, batch
