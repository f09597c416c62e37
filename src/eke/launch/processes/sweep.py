"""A sweep as a list of cells, and its file."""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError
from eke.common.files import own_folder, write_json
from eke.common.masking import masked
from eke.common.paths import RunPaths, SweepPaths, user_path
from eke.config.schema import Config
from eke.config.schema.codec import make_converter
from eke.launch.processes.sweep_job import CHANGED, Job
from eke.plan.identity import meaningful
from eke.plan.planner import Plan
from eke.plan.record import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, EXIT_USER, Outcome

FOR_WRITING = frozenset({"runs_has_space", "runs_writable"})
"""Rules that only a run which still has something to write can break; it could run elsewhere."""

WRITE_S = 1.0
"""Between two writes of a sweep's file."""


@dataclass
class Cell:
    """One point of a sweep, before and after it ran."""

    overrides: tuple[str, ...]
    run_id: str = ""
    """Empty when it was refused before it had one."""
    folder: str = ""
    outcome: str = ""
    """A member name of Outcome; empty while it has not run."""
    reason: str = ""
    """Why it was refused, or how it failed."""
    reused: bool = False
    """Answered from the record of an earlier run."""
    row: str = ""
    """Name of its row in the sweep's definition; empty where there are none."""
    round: int = 0
    """Which repetition of its configuration it is: the key `repeat`."""
    rule: str = ""
    """The rule that kept it from running; empty when none did, or one without an identifier."""

    def refuse(self, error: ConfigError) -> None:
        """Mark it as a run that cannot be, or not now, with the first rule that says so."""
        self.run_id = ""
        outcome = Outcome.crashed if error.is_passing else Outcome.refused
        self.outcome, self.reason = outcome.name, error.short()
        self.rule = error.rule

    def take(self, job: Job) -> None:
        """What has become of its run."""
        self.folder, self.reused = job.folder, job.reused
        self.outcome = job.outcome.name if job.outcome else ""
        self.rule = job.rule
        self.reason, log = job.reason, RunPaths(Path(job.folder)).log
        if job.reason and job.record is not None and log.exists():
            self.reason = f"{job.reason} ({log})"


_HOW = ("launcher.", "resources.", "slurm.", "slurm=", "plan_only=")
"""What says how runs are started, and not which."""


def sweep_id(cells: Sequence[tuple[str, ...]], own: Sequence[Config] = ()) -> str:
    """12 hex digits: the same command is the same sweep, wherever it is sent.

    Args:
        cells: overrides of each.
        own: what they compose to, where options of the user's own (`--config-dir`) take part: the
            same words then mean what the files in that folder say.
    """
    texts: list[Any] = [[t for t in cell if not t.startswith(_HOW)] for cell in cells]
    texts += [meaningful(make_converter().unstructure(config)) for config in own]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12]


def sweep_paths(runs: str, identity: str) -> SweepPaths:
    """Where the sweep's own file is; the runs themselves lie beside it."""
    return SweepPaths(user_path(runs) / f"sweep-{identity}")


def write_sweep(
    paths: SweepPaths, command: Sequence[str], cells: Sequence[Cell], name: str = ""
) -> None:
    """Write sweep.json atomically.

    Args:
        paths: the sweep's files.
        command: what was typed behind `train.py`, so that `eke retry` can type it again.
        cells: all of them.
        name: the option of the group `sweep`; empty for a sweep that was typed.
    """
    own_folder(paths.folder)
    content = {
        "schema_version": 1,
        "name": name,
        "directory": os.getcwd(),
        "command": list(command),
        "cells": [asdict(c) for c in cells],
    }
    write_json(paths.sweep, masked(content))


class SweepFile:
    """sweep.json kept up to date while the sweep runs.

    It is a view: records are the truth, so that a kill between two writes loses nothing, and a
    thousand cells answered at once need not be a thousand files.
    """

    def __init__(
        self, paths: SweepPaths, command: Sequence[str], cells: Sequence[Cell], name: str = ""
    ) -> None:
        self.paths, self.command, self.cells, self.name = paths, command, cells, name
        self.problem = ""
        self._is_current, self._written = False, 0.0

    def note(self, job: Job) -> None:
        """A run has changed."""
        for number in job.cells:
            self.cells[number].take(job)
        self._is_current = False

    def flush(self, at_once: bool = False) -> None:
        """Write it, if anything has changed and the last time is a while ago.

        A disk that takes nothing ends no run: it is tried again, and `problem` says why.
        """
        now = time.monotonic()
        if self._is_current or (now - self._written < WRITE_S and not at_once):
            return
        self._written = now
        try:
            write_sweep(self.paths, self.command, self.cells, self.name)
            self._is_current, self.problem = True, ""
        except OSError as error:
            self.problem = error.strerror or str(error)


def merge_duplicates(plans: Sequence[Plan | None]) -> dict[int, int]:
    """Number of a cell -> number of an earlier cell that is the very same run."""
    first: dict[str, int] = {}
    same: dict[int, int] = {}
    for number, plan in enumerate(plans):
        if plan is not None and first.setdefault(plan.run_id, number) != number:
            same[number] = first[plan.run_id]
    return same


def sweep_exit_code(cells: Sequence[Cell]) -> int:
    """0 when every cell that could run is ok; 2 when none could run; 1 also for a full disk."""
    outcomes = [Outcome[cell.outcome] for cell in cells if cell.outcome]
    ran = [o for o in outcomes if o not in (Outcome.refused, Outcome.skipped)]
    if any(o.exit_code == EXIT_RESUMABLE for o in ran) or len(outcomes) < len(cells):
        return EXIT_RESUMABLE
    if not ran:
        return EXIT_USER
    # Nothing is wrong with these: the same command runs them, some once there is room.
    is_missing = any(cell.rule in FOR_WRITING | {CHANGED} for cell in cells)
    return EXIT_OK if all(o is Outcome.ok for o in ran) and not is_missing else EXIT_FAILED
