"""From plans to processes; torch is never imported here."""

from eke.launch.board import open_board
from eke.launch.books import Books
from eke.launch.folder import Place, claim, find_place
from eke.launch.job import Job
from eke.launch.live import place_of
from eke.launch.pool import Pool, find_devices
from eke.launch.ranks import (
    become_worker,
    check_started_ranks,
    let_rank_0_speak,
    my_rank,
    ranks_are_started,
)
from eke.launch.single import run_single
from eke.launch.sweep import (
    Cell,
    SweepFile,
    merge_duplicates,
    sweep_exit_code,
    sweep_id,
    sweep_paths,
)

__all__ = [
    "Books",
    "Cell",
    "Job",
    "Place",
    "Pool",
    "SweepFile",
    "become_worker",
    "check_started_ranks",
    "claim",
    "find_devices",
    "find_place",
    "let_rank_0_speak",
    "merge_duplicates",
    "my_rank",
    "open_board",
    "place_of",
    "ranks_are_started",
    "run_single",
    "sweep_exit_code",
    "sweep_id",
    "sweep_paths",
]
