"""What a sweep that is only planned is expected to take: memory and time of each cell."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eke.common.text_table import align
from eke.common.units import format_bytes, format_seconds
from eke.estimate.memory import Forecast, Method, as_json, known_forecast
from eke.estimate.time import StepTime, Unknown, forecast_time, num_runs, speed_cell
from eke.estimate.time import as_json as time_as_json
from eke.launch import Cell, Job
from eke.plan.planner import Plan
from eke.results.report import label_cells

HEADER = ("verdict", "memory", "step", "samples/s", "what differs")


@dataclass(frozen=True)
class Outlook:
    """Of one run."""

    memory: Forecast
    time: StepTime | Unknown


def outlook_of(plan: Plan) -> Outlook:
    """What is known of a plan, with nothing started."""
    return Outlook(known_forecast(plan), forecast_time(plan))


def outlooks(jobs: Sequence[Job]) -> dict[int, Outlook]:
    """Number of a cell -> what is expected of its run; cells that are one run share it."""
    found = [(job, outlook_of(job.plan)) for job in jobs]
    return {number: each for job, each in found for number in job.cells}


def render_outlooks(cells: Sequence[Cell], found: Mapping[int, Outlook]) -> str:
    """One line a cell, then the reason of each that is refused; what is not known is blank."""
    labels = label_cells([cell.overrides for cell in cells], [cell.row for cell in cells])
    rows = [
        (*_numbers(cell, found.get(number)), labels[number]) for number, cell in enumerate(cells)
    ]
    lines = align([HEADER, *rows])
    lines += ["", *_sources(found)] if found else []
    for cell, label in zip(cells, labels, strict=True):
        if cell.reason:
            lines += ["", f"{cell.outcome}: {label}", f"  {cell.reason}"]
    return "\n".join(lines)


def _sources(found: Mapping[int, Outlook]) -> list[str]:
    """How many cells' memory was traced, and how many numbers finished runs have corrected."""
    memory = [each.memory for each in found.values()]
    traced = sum(each.method is not Method.closed_form for each in memory)
    corrected = sum(each.calibrated is not None and each.calibrated.peak is not None
                    for each in memory)  # fmt: skip
    lines = [
        f"memory: expected, {traced} traced, {len(memory) - traced} by formulas, "
        f"{corrected} of them calibrated"
    ]
    times = [each.time for each in found.values() if isinstance(each.time, StepTime)]
    if times:
        corrected = sum(num_runs(each) > 0 for each in times)
        lines.append(f"step, samples/s: estimates, {corrected} of {len(times)} calibrated")
    return lines


def _numbers(cell: Cell, found: Outlook | None) -> tuple[str, str, str, str]:
    if found is None:
        return cell.outcome, "", "", ""
    memory = format_bytes(found.memory.best.expected)
    step = "" if isinstance(found.time, Unknown) else format_seconds(found.time.step_s.expected)
    return found.memory.verdict.value, memory, step, speed_cell(found.time)


def outlooks_as_json(
    cells: Sequence[Cell],
    found: Mapping[int, Outlook],
    records: Mapping[int, Mapping[str, object]],
) -> str:
    """The same for machines, under the record's field paths; refused cells say why.

    Args:
        cells: of the sweep.
        found: number of a cell -> what is expected of it.
        records: number of a cell -> what is known of a finished run of it.
    """
    content = [
        _plain(cell, found.get(number)) | dict(records.get(number, {}))
        for number, cell in enumerate(cells)
    ]
    return json.dumps(content, indent=2)


def _plain(cell: Cell, found: Outlook | None) -> dict[str, Any]:
    plain: dict[str, Any] = {"overrides": list(cell.overrides), "run_id": cell.run_id or None}
    if found is None:
        return plain | {"outcome": cell.outcome, "rule": cell.rule or None, "reason": cell.reason}
    return plain | {"memory": as_json(found.memory)} | time_as_json(found.time)
