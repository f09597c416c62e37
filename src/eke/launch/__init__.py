"""Launchers: from plans to processes, without torch."""

from eke.launch.interface import (
    JobStatus,
    Launcher,
    StartedSweep,
    Target,
    declared_target,
    find_launcher,
)
from eke.launch.processes.follow import Board, open_board, watching
from eke.launch.processes.nodes import Head, follow
from eke.launch.processes.run_dir import Place, claim, find_place
from eke.launch.processes.running_run import Probed, place_of, probe
from eke.launch.processes.sweep import (
    FOR_WRITING,
    Cell,
    Job,
    SweepFile,
    merge_duplicates,
    run_single,
    sweep_exit_code,
    sweep_id,
    sweep_paths,
)
from eke.launch.processes.sweep_state import Books, Rerun, done_again, smallest_first
from eke.launch.processes.worker_process import STOP_SIGNALS, become_worker

__all__ = [
    "FOR_WRITING",
    "STOP_SIGNALS",
    "Board",
    "Books",
    "Cell",
    "Head",
    "Job",
    "JobStatus",
    "Launcher",
    "Place",
    "Probed",
    "Rerun",
    "StartedSweep",
    "SweepFile",
    "Target",
    "become_worker",
    "claim",
    "declared_target",
    "done_again",
    "find_launcher",
    "find_place",
    "follow",
    "merge_duplicates",
    "open_board",
    "place_of",
    "probe",
    "run_single",
    "smallest_first",
    "sweep_exit_code",
    "sweep_id",
    "sweep_paths",
    "watching",
]
