"""How long? What a step does, what its device can do, and the time that takes; no torch."""

from eke.pace.compiling import compile_seconds
from eke.pace.estimate import forecast_time
from eke.pace.observed import note_pace
from eke.pace.show import TITLE, render_time, speed_cell, sum_line, time_line
from eke.pace.slowdown import num_runs, slowdown
from eke.pace.stored import as_json, note_predictions
from eke.pace.values import PARTS, PaceCalibration, Span, StepTime, Unknown

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
