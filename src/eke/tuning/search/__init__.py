"""Which configuration is the fastest that fits? Candidates, a search, and its words; no torch."""

from eke.tuning.search.axes import Axis, Numerics, Value, axes_for, group_of
from eke.tuning.search.candidates import (
    Candidate,
    Candidates,
    cut_overrides,
    enumerate_candidates,
    room_of,
)
from eke.tuning.search.experiment import (
    free_path,
    own_path,
    refuse_what_is_no_name,
    write_experiment,
)
from eke.tuning.search.objective import Objective
from eke.tuning.search.resolve_axes import spelt_out
from eke.tuning.search.result import Fit, all_diverge, fit_of
from eke.tuning.search.search import Search
from eke.tuning.search.search_space import Point, Room, Trial
from eke.tuning.search.show import (
    describe_candidates,
    describe_fit,
    describe_trial,
    likely,
    short_name,
)
from eke.tuning.search.trials import Measured, is_higher, measured, trial_overrides, without

__all__ = [
    "Axis",
    "Candidate",
    "Candidates",
    "Fit",
    "Measured",
    "Numerics",
    "Objective",
    "Point",
    "Room",
    "Search",
    "Trial",
    "Value",
    "all_diverge",
    "axes_for",
    "cut_overrides",
    "describe_candidates",
    "describe_fit",
    "describe_trial",
    "enumerate_candidates",
    "fit_of",
    "free_path",
    "group_of",
    "is_higher",
    "likely",
    "measured",
    "own_path",
    "refuse_what_is_no_name",
    "room_of",
    "short_name",
    "spelt_out",
    "trial_overrides",
    "without",
    "write_experiment",
]
