"""Search for the fastest configuration that fits: candidates, search and report; no torch."""

from eke.tuning.search.candidates import (
    Candidate,
    Candidates,
    SearchAxis,
    Value,
    axes_for,
    cut_overrides,
    enumerate_candidates,
    room_of,
    spelt_out,
)
from eke.tuning.search.result import (
    Fit,
    all_diverge,
    fit_of,
    free_path,
    own_path,
    refuse_what_is_no_name,
    write_experiment,
)
from eke.tuning.search.search import Measured, Search, is_higher, measured, trial_overrides, without
from eke.tuning.search.search_space import FitsMemory, Objective, Point, Trial
from eke.tuning.search.show import (
    describe_candidates,
    describe_fit,
    describe_trial,
    likely,
    short_name,
)

__all__ = [
    "Candidate",
    "Candidates",
    "Fit",
    "FitsMemory",
    "Measured",
    "Objective",
    "Point",
    "Search",
    "SearchAxis",
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
