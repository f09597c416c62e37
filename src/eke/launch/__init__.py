"""From plans to processes; torch is never imported here."""

from eke.launch.board import Board, open_board
from eke.launch.books import Books, done_again
from eke.launch.dominance import smallest_first
from eke.launch.folder import Place, claim, find_place
from eke.launch.job import Job
from eke.launch.live import place_of
from eke.launch.nodes import Head, follow
from eke.launch.pool import Devices, Pool, find_devices, forking, probe_in_pool, start_run
from eke.launch.probe import Probed, probe
from eke.launch.rerun import Rerun
from eke.launch.single import run_single
from eke.launch.supervise import STOP_SIGNALS, become_worker
from eke.launch.sweep import (
    FOR_WRITING,
    Cell,
    SweepFile,
    merge_duplicates,
    sweep_exit_code,
    sweep_id,
    sweep_paths,
)
from eke.launch.watched import watching

__all__ = [
    "FOR_WRITING",
    "STOP_SIGNALS",
    "Board",
    "Books",
    "Cell",
    "Devices",
    "Head",
    "Job",
    "Place",
    "Pool",
    "Probed",
    "Rerun",
    "SweepFile",
    "become_worker",
    "claim",
    "done_again",
    "find_devices",
    "find_place",
    "follow",
    "forking",
    "merge_duplicates",
    "open_board",
    "place_of",
    "probe",
    "probe_in_pool",
    "run_single",
    "smallest_first",
    "start_run",
    "sweep_exit_code",
    "sweep_id",
    "sweep_paths",
    "watching",
]
