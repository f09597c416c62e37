"""Memory forecast of a plan on its device, without torch."""

from eke.estimate.memory.auto_batch import (
    BatchChoice,
    BatchSearch,
    Probe,
    note_choice,
    reserve_of,
    room_for_a_batch,
)
from eke.estimate.memory.components import Forecast, Method, Traced, Verdict
from eke.estimate.memory.predict_memory import (
    forecast,
    known_forecast,
    least_bytes,
    least_host_bytes,
    needs_trace,
    traced_forecast,
    traced_forecasts,
)
from eke.estimate.memory.render_memory import (
    DeviceForecast,
    as_json,
    expected_text,
    forecast_details,
    forecast_lines,
    largest_batch,
    memory_table,
    note_measured_batch,
    render_devices,
)
from eke.estimate.memory.trace_client import examine_own_code, stop_tracing
