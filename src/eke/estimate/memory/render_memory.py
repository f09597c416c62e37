"""A forecast as text in the terminal's width, for one or all devices, for records and as JSON."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from eke.common.screen import paint, table_width, width, wrap
from eke.common.table import Column, render_table
from eke.common.text import GIB, align, format_bytes, format_number, format_range
from eke.estimate.memory.components import MEMORY_PHASES, Forecast, Method, Verdict
from eke.estimate.memory.peak_by_phase import COMPONENTS
from eke.estimate.memory.predict_memory import (
    allocated_of,
    forecast,
    highest_phase,
    least_host_bytes,
)
from eke.models.sizes import shared_state_bytes
from eke.plan.planner import MicroBatchShape, Plan, simulated_micro_batches
from eke.plan.record import PredictedMemory, Record

METHODS = {
    Method.trace: "traced",
    Method.upper_bound: "traced uncompiled",
    Method.closed_form: "by formulas",
}


_STYLES = {Verdict.fits: "bold green", Verdict.does_not_fit: "bold red"}
_PLURALS = {Verdict.fits.value: "fit", Verdict.does_not_fit.value: "do not fit"}


def forecast_lines(plan: Plan, found: Forecast) -> list[str]:
    """Return verdict, expected memory and device."""
    first = f"{paint(found.verdict.value, _STYLES.get(found.verdict, 'bold yellow'))}  "
    method = METHODS[found.method]
    return wrap(f"{expected_text(found, method)} {_place(plan, found)}", width(), first, "  ")


def sweep_verdict(found: Sequence[tuple[Plan, Forecast]], rejected: dict[str, int]) -> list[str]:
    """Return the runs by verdict, and the run with the largest share of its device's memory.

    `rejected`: word -> number of runs without a forecast.
    """
    verdicts, texts = Counter(each.verdict for _, each in found), list[str]()
    styles = {each.value: _STYLES.get(each, "bold yellow") for each in Verdict}
    for word, number in ({each.value: verdicts[each] for each in Verdict} | rejected).items():
        count = str(number) if texts else format_number(number, "run")
        text = f"{count} {word if number == 1 else _PLURALS.get(word, word)}"
        texts += [paint(text, styles.get(word, "bold red"))] if number else []
    if not found:
        return [", ".join(texts)]
    plan, most = max(found, key=lambda pair: pair[1].peak.expected / (pair[1].capacity or 1))
    text = f"{'at most ' * (len(found) > 1)}{expected_text(most, METHODS[most.method])}"
    return wrap(f"{text} {_place(plan, most)}", width(), f"{', '.join(texts)}  ", "  ")


def expected_text(found: Forecast, method: str = "") -> str:
    """Return expected peak and range as text."""
    peak, remark = found.peak, f", {method}" if method else ""
    between = format_range(format_bytes(peak.low), format_bytes(peak.high))
    return f"{format_bytes(peak.expected)} expected ({between}{remark})"


def _place(plan: Plan, found: Forecast) -> str:
    capacity = None if found.capacity is None else format_bytes(found.capacity)
    if plan.device.kind != "cpu":
        return f"on {plan.device.name}, {capacity or 'whose memory is unknown'}"
    if capacity is None:
        return "in host memory of unknown size"
    many = plan.processes_per_node
    return f"of {capacity} on this machine" + (f" for each of {many} processes" if many > 1 else "")


_MOST_PARTS = 6
"""Number of rows of the short memory table: a choice."""


def memory_table(found: Forecast, every: bool) -> list[str]:
    """Return the parts of the expected peak: the largest and their rest, or every part."""
    rows = [(COMPONENTS.get(name, name), size) for name, size in found.components.items()]
    if not every and len(rows) > _MOST_PARTS:
        rows.sort(key=lambda row: -row[1])
        rest = sum(size for _, size in rows[_MOST_PARTS - 1 :])
        rows = [*rows[: _MOST_PARTS - 1], ("other", rest)]
    whole = sum(size for _, size in rows) or 1
    cells = [(label, format_bytes(size), f"{size / whole:.0%}") for label, size in rows]
    lines = [f"  {line}" for line in align(cells, right=[1, 2])] if cells else []
    longest = min(30, width() - max(map(len, lines), default=0) - 2)
    bars = (f"  {'#' * round(longest * size / whole)}" for _, size in rows)
    return [f"{line}{bar}".rstrip() for line, bar in zip(lines, bars, strict=True)]


def forecast_details(plan: Plan, found: Forecast) -> list[str]:
    """Return phases, basis and reasons for the range."""
    sizes = [f"{phase} {format_bytes(size)}" for phase, size in found.phases.items() if size]
    return [
        wrapped(f"memory is highest {MEMORY_PHASES[highest_phase(found)]}"),
        wrapped(f"tensors by phase: {', '.join(sizes)}"),
        *_anatomy(plan),
        wrapped(f"counted: {found.basis}"),
        *_rows(plan),
        *(wrapped(f"not exact: {note}") for note in found.notes),
    ]


def wrapped(text: str, indent: int = 2) -> str:
    """Return a paragraph of the terminal's width, with further lines indented by two more."""
    return "\n".join(wrap(text, width(), " " * indent, " " * (indent + 2)))


def _anatomy(plan: Plan) -> list[str]:
    """Return the bytes per parameter of memory kept between steps, as in the guides."""
    count = plan.size.num_parameters
    if not count:
        return []
    state = shared_state_bytes(plan.config, plan.size, plan.device.kind == "cpu", plan.compute)
    named = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "float32 copies": state.master,
    }
    parts = [f"{size / count:.3g} {name}" for name, size in named.items() if size]
    total = sum(named.values()) / count
    return [wrapped(f"bytes per parameter: {' + '.join(parts)} = {total:.3g}")]


def host_budget(plan: Plan, found: Forecast) -> str:
    """Return the least host memory for ranks on GPUs as text."""
    needed, has = least_host_bytes(plan, found), plan.device.host_memory_bytes
    room = f" of {format_bytes(has)}" + ": does not fit" * (needed > has) if has else ""
    return f"at least {format_bytes(needed)}{room}"


def _rows(plan: Plan) -> list[str]:
    """Return the batch lengths behind memory and time, if they differ."""
    made = simulated_micro_batches(plan)
    if not made.differ:
        return []
    low, mean, high = (
        f"{micro.rows} x {micro.source}"
        + (f" + {micro.target}" if micro.target != micro.source else "")
        + " tokens"
        for micro in (made.shortest, made.mean, made.expected)
    )
    text = f"rows: memory for the longest expected micro-batch, {high} (low end: {low}), time for"
    tokens = plan.size.tokens_per_sample
    return [wrapped(f"{text} the mean, {mean}, FLOPs for {tokens:.1f} tokens per sample")]


@dataclass(frozen=True)
class DeviceForecast:
    """One configuration on one device."""

    option: str
    """Option of `hardware`."""
    memory_bytes: int | None
    forecast: Forecast | None = None
    """None if a rule rejects the configuration there."""
    batch: int = 0
    """Largest micro-batch whose high forecast fits. 0 if none."""
    reason: str = ""
    speed: str = ""
    """Expected samples per second as a range. Empty if unknown."""
    speed_runs: int = 0
    """Number of finished runs that correct `speed`."""
    per_device: int = 0
    """Micro-batch of the forecast, set by the user or chosen by batch=auto."""


def largest_batch(plan: Plan, found: Forecast) -> int:
    """Return the largest micro-batch that fits by formulas or by `found`, 0 if none does."""

    def is_too_large(size: int) -> bool:
        batch = replace(plan.batch, per_device=size, eval_per_device=size)
        return forecast(replace(plan, batch=batch)).verdict is not Verdict.fits

    known = plan.batch.per_device if found.verdict is Verdict.fits else 0
    return max(known, bisect_left(range(1, 2**16 + 1), True, key=is_too_large))


def render_devices(
    rows: Sequence[DeviceForecast], per_device: int | None, target: int, count: int = 1
) -> str:
    """Return one line per device. `per_device` is None if batch=auto kept `target` samples."""
    last = "micro-batch"
    ranks = {
        "hardware": 0,
        "GiB": 2,
        "verdict": 0,
        "expected": 1,
        "of it": 3,
        "samples/s": 0,
        last: 0,
    }
    cells = zip(*(_cells(row, per_device is None) for row in rows), strict=True)
    table = [
        Column(title, texts, title not in ("hardware", "verdict"), rank)
        for (title, rank), texts in zip(ranks.items(), cells, strict=True)
    ]
    batch = f"batch.per_device={per_device}" if per_device else f"batch=auto batch.target={target}"
    verdicts = [row.forecast.verdict for row in rows if row.forecast is not None]
    fits, each = verdicts.count(Verdict.fits), f"{format_number(count, 'device')} each"
    style = _STYLES[Verdict.fits if fits else Verdict.does_not_fit]
    first = paint(f"fits on {fits} of {format_number(len(rows), 'GPU model')}", style)
    lines = [*wrap(f"{each}, {batch}", width(), f"{first}  ", "  "), ""]
    lines += render_table(table, table_width())
    what = "the largest whose highest forecast fits"
    if per_device is None:
        what = "the largest that fits and keeps the samples per step"
    lines += [
        "",
        f"  {last}: {what}",
        f"  samples/s: an estimate for {'all' if count > 1 else 'one'} with batch.per_device",
    ]
    methods = {row.option: row.forecast.method for row in rows if row.forecast is not None}
    traced = [name for name, method in methods.items() if method is not Method.closed_form]
    words = f"by formulas, traced: {', '.join(traced)}" if traced else "by formulas"
    lines.append(wrapped(f"expected: {words if len(traced) < len(methods) else 'traced'}"))
    corrected = [f"{row.option} ({row.speed_runs} runs)" for row in rows if row.speed_runs]
    few = "samples/s not calibrated: too few finished runs on each device"
    lines.append(wrapped(f"samples/s calibrated: {', '.join(corrected)}" if corrected else few))
    lines += [wrapped(f"{row.option}: {row.reason}") for row in rows if row.reason]
    return "\n".join(lines)


def _cells(row: DeviceForecast, chosen: bool) -> tuple[str, ...]:
    memory = f"{row.memory_bytes / GIB:.1f}" if row.memory_bytes else "?"
    if row.forecast is None:
        return row.option, memory, "rejected", "", "", "", ""
    peak = row.forecast.peak.expected
    share = f"{peak / row.memory_bytes:.0%}" if row.memory_bytes else ""
    batch = str(row.batch) if row.batch else "none"
    if chosen:
        batch = str(row.per_device) if row.forecast.verdict is Verdict.fits else "none"
    size, word = f"{peak / GIB:.1f} GiB", row.forecast.verdict.value
    return row.option, memory, word, size, share, row.speed, batch


def as_record(found: Forecast) -> PredictedMemory:
    """Return a forecast in the record's form."""
    return PredictedMemory(
        **asdict(found.peak),
        components=dict(found.components),
        method=found.method.value,
        basis=found.basis,
        allocated_bytes=found.allocated.expected,
        verdict=found.verdict.value,
        notes=list(found.notes),
    )


def note_measured_batch(record: Record, plan: Plan, micro: MicroBatchShape | None) -> None:
    """Adapt a record's forecast to `micro`, the largest micro-batch of a CPU's profiled step."""
    found, made = record.memory.predicted, simulated_micro_batches(plan)
    if micro is None or found is None or not found.allocated_bytes or micro == made.expected:
        return
    found.allocated_bytes += allocated_of(plan, micro) - allocated_of(plan, made.expected)


def as_json(found: Forecast) -> dict[str, Any]:
    """Return a forecast under the record's field paths: `memory.predicted.low`."""
    return {"predicted": asdict(as_record(found)) | {"capacity": found.capacity}}
