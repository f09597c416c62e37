"""Will it fit? What a plan will take of its device's memory; no torch."""

from eke.estimate.memory.advice import ROOM, Advice, advise, mildest, ranked
from eke.estimate.memory.auto_batch import (
    BatchSearch,
    Chosen,
    Probe,
    ProbeResult,
    note_choice,
    reserve_of,
    room_for_a_batch,
)
from eke.estimate.memory.components import Forecast, Method, Traced, Verdict
from eke.estimate.memory.predict_memory import (
    forecast,
    is_open,
    known_forecast,
    least_bytes,
    least_host_bytes,
    traced_forecast,
    traced_forecasts,
)
from eke.estimate.memory.refuse_oom import (
    DOES_NOT_FIT,
    cannot_fit,
    refuse_what_cannot_fit,
    refuse_what_ran_out,
    what_makes_room,
)
from eke.estimate.memory.render_memory import (
    as_json,
    compare_devices,
    forecast_line,
    note_forecast,
    note_measured_batch,
    render_advice,
    render_devices,
    render_forecast,
)
from eke.estimate.memory.trace_client import stop_tracing

__all__ = [
    "DOES_NOT_FIT",
    "ROOM",
    "Advice",
    "BatchSearch",
    "Chosen",
    "Forecast",
    "Method",
    "Probe",
    "ProbeResult",
    "Traced",
    "Verdict",
    "advise",
    "as_json",
    "cannot_fit",
    "compare_devices",
    "forecast",
    "forecast_line",
    "is_open",
    "known_forecast",
    "least_bytes",
    "least_host_bytes",
    "mildest",
    "note_choice",
    "note_forecast",
    "note_measured_batch",
    "ranked",
    "refuse_what_cannot_fit",
    "refuse_what_ran_out",
    "render_advice",
    "render_devices",
    "render_forecast",
    "reserve_of",
    "room_for_a_batch",
    "stop_tracing",
    "traced_forecast",
    "traced_forecasts",
    "what_makes_room",
]
