"""Step time from the work of a step and the rates of its device, without torch."""

from eke.estimate.time.rates import StepTime, Unknown
from eke.estimate.time.slowdowns import compile_seconds, steps_to_pay
from eke.estimate.time.step_time import (
    forecast_time,
    num_runs,
    predicted_step,
    slowdown,
    speed_cell,
    step_time_json,
    sum_line,
    table_notes,
    time_line,
    time_rows,
)
from eke.estimate.time.time_history import record_step_time
