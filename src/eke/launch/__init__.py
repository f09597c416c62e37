"""From plans to processes; torch is never imported here."""

from eke.launch.folder import Place, claim, find_place
from eke.launch.sequence import (
    Cell,
    merge_duplicates,
    sweep_exit_code,
    sweep_id,
    sweep_paths,
    write_sweep,
)
from eke.launch.single import place_of, run_single

__all__ = [
    "Cell",
    "Place",
    "claim",
    "find_place",
    "merge_duplicates",
    "place_of",
    "run_single",
    "sweep_exit_code",
    "sweep_id",
    "sweep_paths",
    "write_sweep",
]
