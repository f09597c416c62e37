"""From plans to processes; torch is never imported here."""

from eke.launch.board import open_board
from eke.launch.books import Books
from eke.launch.dominance import smallest_first
from eke.launch.folder import Place, claim, find_place
from eke.launch.job import Job
from eke.launch.live import place_of
from eke.launch.nodes import Head, follow, this_task
from eke.launch.pool import Devices, Pool, find_devices, forking, probe_in_pool, start_run
from eke.launch.probe import Probed, probe
from eke.launch.ranks import (
    become_worker,
    check_started_ranks,
    check_started_tasks,
    is_first,
    let_rank_0_speak,
    machines_at_hand,
    my_rank,
    ranks_are_started,
)
from eke.launch.single import run_single
from eke.launch.speech import speak
from eke.launch.supervise import STOP_SIGNALS
from eke.launch.sweep import (
    Cell,
    SweepFile,
    merge_duplicates,
    sweep_exit_code,
    sweep_id,
    sweep_paths,
)

__all__ = [
    "STOP_SIGNALS",
    "Books",
    "Cell",
    "Devices",
    "Head",
    "Job",
    "Place",
    "Pool",
    "Probed",
    "SweepFile",
    "become_worker",
    "check_started_ranks",
    "check_started_tasks",
    "claim",
    "find_devices",
    "find_place",
    "follow",
    "forking",
    "is_first",
    "let_rank_0_speak",
    "machines_at_hand",
    "merge_duplicates",
    "my_rank",
    "open_board",
    "place_of",
    "probe",
    "probe_in_pool",
    "ranks_are_started",
    "run_single",
    "smallest_first",
    "speak",
    "start_run",
    "sweep_exit_code",
    "sweep_id",
    "sweep_paths",
    "this_task",
]
