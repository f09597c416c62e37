"""Will it fit? What a plan will take of its device's memory; no torch."""

from eke.forecast.advice import ROOM, Advice, advise, first_advice, ranked
from eke.forecast.ask import stop_tracing
from eke.forecast.auto import Chosen, Probe, Search, Trial, reserve_of, room_for_a_batch
from eke.forecast.compare import compare_devices, largest_batch, render_devices
from eke.forecast.known import is_open, known_forecast, traced_forecast, traced_forecasts
from eke.forecast.pairs import note_pair
from eke.forecast.predict import (
    forecast,
    highest_phase,
    least_bytes,
    least_host_bytes,
    verdict,
)
from eke.forecast.rule import (
    DOES_NOT_FIT,
    cannot_fit,
    refuse_what_cannot_fit,
    refuse_what_ran_out,
    what_makes_room,
)
from eke.forecast.seen import note_choice
from eke.forecast.show import forecast_line, render_advice, render_forecast
from eke.forecast.stored import (
    advice_for,
    as_json,
    as_record,
    as_text,
    note_forecast,
    note_measured_batch,
    predicted,
)
from eke.forecast.values import PHASES, Calibrated, Forecast, Method, Range, Traced, Verdict

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
