"""From plans to processes; torch is never imported here."""

from eke.launch.folder import Place, claim, find_place
from eke.launch.ranks import (
    become_worker,
    check_started_ranks,
    let_rank_0_speak,
    my_rank,
    ranks_are_started,
)
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
    "become_worker",
    "check_started_ranks",
    "claim",
    "find_place",
    "let_rank_0_speak",
    "merge_duplicates",
    "my_rank",
    "place_of",
    "ranks_are_started",
    "run_single",
    "sweep_exit_code",
    "sweep_id",
    "sweep_paths",
    "write_sweep",
]
