"""Will it fit? What a plan will take of its device's memory; no torch."""

from eke.estimate.memory.advice import ROOM, Advice, advise, first_advice, ranked
from eke.estimate.memory.auto_batch import (
    Chosen,
    Probe,
    Search,
    Trial,
    reserve_of,
    room_for_a_batch,
)
from eke.estimate.memory.batch_cache import note_choice
from eke.estimate.memory.best_forecast import (
    is_open,
    known_forecast,
    traced_forecast,
    traced_forecasts,
)
from eke.estimate.memory.compare import compare_devices, largest_batch, render_devices
from eke.estimate.memory.memory_history import note_pair
from eke.estimate.memory.predict import (
    forecast,
    highest_phase,
    least_bytes,
    least_host_bytes,
    verdict,
)
from eke.estimate.memory.refuse_oom import (
    DOES_NOT_FIT,
    cannot_fit,
    refuse_what_cannot_fit,
    refuse_what_ran_out,
    what_makes_room,
)
from eke.estimate.memory.serialize import (
    advice_for,
    as_json,
    as_record,
    as_text,
    note_forecast,
    note_measured_batch,
    predicted,
)
from eke.estimate.memory.show import forecast_line, render_advice, render_forecast
from eke.estimate.memory.trace_client import stop_tracing
from eke.estimate.memory.values import PHASES, Calibrated, Forecast, Method, Range, Traced, Verdict

__all__ = [
    "DOES_NOT_FIT",
    "PHASES",
    "ROOM",
    "Advice",
    "Calibrated",
    "Chosen",
    "Forecast",
    "Method",
    "Probe",
    "Range",
    "Search",
    "Traced",
    "Trial",
    "Verdict",
    "advice_for",
    "advise",
    "as_json",
    "as_record",
    "as_text",
    "cannot_fit",
    "compare_devices",
    "first_advice",
    "forecast",
    "forecast_line",
    "highest_phase",
    "is_open",
    "known_forecast",
    "largest_batch",
    "least_bytes",
    "least_host_bytes",
    "note_choice",
    "note_forecast",
    "note_measured_batch",
    "note_pair",
    "predicted",
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
    "verdict",
    "what_makes_room",
]
