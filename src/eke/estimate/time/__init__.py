"""Step time: the work of a step, the rates of its device, and the time it takes; no torch."""

from eke.estimate.time.slowdown import as_json, note_predictions, num_runs, slowdown
from eke.estimate.time.slowdowns import compile_seconds
from eke.estimate.time.step_time import (
    TITLE,
    forecast_time,
    render_time,
    speed_cell,
    sum_line,
    time_line,
)
from eke.estimate.time.time_history import note_pace
from eke.estimate.time.values import PARTS, PaceCalibration, Span, StepTime, Unknown

__all__ = [
    "PARTS",
    "TITLE",
    "PaceCalibration",
    "Span",
    "StepTime",
    "Unknown",
    "as_json",
    "compile_seconds",
    "forecast_time",
    "note_pace",
    "note_predictions",
    "num_runs",
    "render_time",
    "slowdown",
    "speed_cell",
    "sum_line",
    "time_line",
]
