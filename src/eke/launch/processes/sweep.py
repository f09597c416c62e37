"""Jobs of a sweep, its file, and a single run in the foreground."""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError
from eke.common.files import own_folder, write_json
from eke.common.masking import masked
from eke.common.paths import RunPaths, SweepPaths, user_path
from eke.common.process_env import ranks_are_started
from eke.common.text import format_seconds
from eke.config.schema import LAUNCH_GROUPS, Config
from eke.config.schema.codec import make_converter
from eke.launch.devices import Grant
from eke.launch.processes.follow import RunView, open_view
from eke.launch.processes.nodes import Head, launch_attempt
from eke.launch.processes.running_run import LiveRun
from eke.launch.processes.worker_process import forward_signals
from eke.plan.identity import meaningful
from eke.plan.planner import Plan
from eke.plan.record import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, EXIT_USER, Outcome, Record

MAX_CRASHES = 2
"""Times a run may crash in one command without getting any further: the second is no chance."""

MAX_INTERRUPTIONS = 5
"""Maximum external stops without progress within one command."""

CHANGED = "as_planned"
"""Failure of a run rejected by its worker: its input or software changed after planning."""

_RETRIED = {
    Outcome.crashed: MAX_CRASHES,
    **dict.fromkeys((Outcome.preempted, Outcome.timeout), MAX_INTERRUPTIONS),
}


def worth_of(record: Record, before: Record | None, elapsed_s: float) -> tuple[float, float]:
    """Seconds of training that an attempt has added, and that its start took, where known."""
    trained_s = (before and before.timing.train_s) or 0.0
    gained = max(0.0, (record.timing.train_s or 0.0) - trained_s)
    started = record.timing.startup_s
    return gained, max(0.0, elapsed_s - gained) if started is None else started


def are_in_vain(worths: Sequence[Sequence[float]], number: int = MAX_INTERRUPTIONS) -> str:
    """Why the newest attempts (`worth_of`), if so many, are no use; empty: use, or none at all."""
    gained, started = (sum(w[k] for w in worths[-number:]) for k in (0, 1))
    if not 0 < number <= len(worths) or not 0 < gained < started:
        return ""
    times = f"{format_seconds(gained)}, and their starts took {format_seconds(started)}"
    return f"{number} attempts in a row trained for {times}; the same command goes on"


@dataclass(eq=False)
class Job:
    """One run of a sweep."""

    number: int
    """Index of its first job, from 0."""
    label: str
    """Overrides that distinguish it from the others."""
    plan: Plan
    cells: list[int] = field(default_factory=list)
    """Indices of all jobs that are this run, its own first."""
    outcome: Outcome | None = None
    """How it ended; None while there is something to do."""
    reason: str = ""
    """Why it did not end well, or did not run."""
    rule: str = ""
    """The rule that kept it from starting; empty when none did, or one without an identifier."""
    record: Record | None = None
    folder: str = ""
    reused: bool = False
    """Answered from the record of an earlier run."""
    live: Any = None
    """Its attempt while it runs: `LiveRun`, or `ClusterRun` of a job; None while it does not."""
    grant: Grant | None = None
    pid: int = 0
    """Of its worker, or of what has started its workers; 0 where that is on another machine."""
    where: str = ""
    """Its devices or its node, as a table shows them."""
    started: float = 0.0
    """time.monotonic() of the current attempt."""
    lasted_s: float = 0.0
    """Seconds its attempts took."""
    not_before: float = 0.0
    """time.monotonic() before which there is no use in trying."""
    overtaken: int = 0
    """Times a later run was started while this one waited for its devices."""
    waiting_for: str = ""
    """Holder of the run or its devices; empty if none."""
    tries: dict[Outcome, int] = field(default_factory=dict)
    """Ends without a step more than before."""
    steps_before: int = 0
    worths: list[tuple[float, float]] = field(default_factory=list)
    """Of its attempts in this command: see `worth_of`."""

    def __post_init__(self) -> None:
        self.cells = self.cells or [self.number]

    @property
    def kind(self) -> str:
        """Of device it runs on: `cuda` or `cpu`."""
        return self.plan.device.kind

    @property
    def num_devices(self) -> int:
        """Devices it needs at once."""
        return self.plan.batch.world_size * self.plan.batch.devices

    def is_waiting(self) -> bool:
        """Whether it could be started."""
        return self.outcome is None and self.live is None

    def settle(self, record: Record) -> bool:
        """Take note of how an attempt ended; returns whether there should be another one."""
        outcome = Outcome[record.outcome]
        if record.steps_done > self.steps_before:
            self.tries.clear()
        self.steps_before = record.steps_done
        elapsed_s = time.monotonic() - self.started if self.started else 0.0
        self.worths.append(worth_of(record, self.record, elapsed_s))
        self.tries[outcome] = self.tries.get(outcome, 0) + 1
        self.record = record
        vain = are_in_vain(self.worths) if outcome in _RETRIED else ""
        if not vain and self.tries[outcome] < _RETRIED.get(outcome, 0):
            return True
        failure = record.failure
        # A worker that refuses a configuration has a traceback, in its log.
        changed = outcome is Outcome.refused and not (failure and failure.traceback)
        self.end(outcome, vain or (failure.message if failure else ""), CHANGED if changed else "")
        return False

    def end(self, outcome: Outcome, reason: str = "", rule: str = "") -> None:
        """Nothing more is to be done."""
        self.outcome, self.reason, self.rule, self.waiting_for = outcome, reason, rule, ""


FOR_WRITING = frozenset({"runs_has_space", "runs_writable"})
"""Rules that only a run which still has something to write can break; it could run elsewhere."""

WRITE_S = 1.0
"""Between two writes of a sweep's file."""


@dataclass
class Cell:
    """One point of a sweep, before and after it ran; fields as of `Job`."""

    overrides: tuple[str, ...]
    run_id: str = ""
    """Empty if it was rejected before it had one."""
    folder: str = ""
    outcome: str = ""
    """A member name of Outcome; empty while it has not run."""
    reason: str = ""
    reused: bool = False
    row: str = ""
    """Name of its row in the sweep's definition; empty where there are none."""
    round: int = 0
    """Repetition of its configuration: the key `repeat`."""
    rule: str = ""

    def refuse(self, error: ConfigError) -> None:
        """Mark it as invalid, or as not possible now, with the first rule that rejects it."""
        self.run_id = ""
        outcome = Outcome.crashed if error.is_passing else Outcome.refused
        self.outcome, self.reason = outcome.name, error.short()
        self.rule = error.rule

    def take(self, job: Job) -> None:
        """Outcome of its run."""
        self.folder, self.reused, self.rule = job.folder, job.reused, job.rule
        self.outcome = job.outcome.name if job.outcome else ""
        self.reason, log = job.reason, RunPaths(Path(job.folder)).log
        if job.reason and job.record is not None and log.exists():
            self.reason = f"{job.reason} ({log})"


_HOW = (*(f"{group}{end}" for group in LAUNCH_GROUPS for end in ".="), "plan_only=")
"""Starts of overrides that say how runs are started, not which runs."""


def sweep_id(
    cells: Sequence[tuple[str, ...]], own: Sequence[Config] = (), rule: Sequence[str] = ()
) -> str:
    """12 hex digits: the same command is the same sweep, wherever it is sent.

    `cells`: overrides of each job; `own`: what they compose to, if that depends on the user's files
    (`--config-dir`); `rule`: of `sweep.repeats=auto`, whose cells are those of the first round.
    """
    texts: list[Any] = [[t for t in cell if not t.startswith(_HOW)] for cell in cells]
    texts += [meaningful(make_converter().unstructure(config)) for config in own]
    texts += [list(rule)] if rule else []
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12]


def sweep_paths(runs: str, identity: str) -> SweepPaths:
    """Folder of the sweep's file; the run folders are its siblings."""
    return SweepPaths(user_path(runs) / f"sweep-{identity}")


class SweepFile:
    """sweep.json kept up to date while the sweep runs; the records are the truth."""

    def __init__(
        self, paths: SweepPaths, command: Sequence[str], cells: Sequence[Cell], name: str = ""
    ) -> None:
        self.paths, self.command, self.cells, self.name = paths, command, cells, name
        self.problem = ""
        self.repeats: dict[str, Any] = {}
        """Rule and decisions of `sweep.repeats=auto`; empty for a fixed number."""
        self._is_current, self._written = False, 0.0

    def note(self, job: Job) -> None:
        """A run has changed."""
        for number in job.cells:
            self.cells[number].take(job)
        self._is_current = False

    def note_rounds(self, found: dict[str, Any]) -> None:
        """Write what a round of `sweep.repeats=auto` has decided."""
        self.repeats, self._is_current = found, False
        self.flush(at_once=True)

    def flush(self, at_once: bool = False) -> None:
        """Write it if anything has changed, now and then; `problem`: why that failed."""
        now = time.monotonic()
        if self._is_current or (now - self._written < WRITE_S and not at_once):
            return
        self._written = now
        try:
            self._write()
            self._is_current, self.problem = True, ""
        except OSError as error:
            self.problem = error.strerror or str(error)

    def _write(self) -> None:
        own_folder(self.paths.folder)
        content = {
            "schema_version": 1,
            "name": self.name,
            "directory": os.getcwd(),
            "command": list(self.command),
            "cells": [asdict(cell) for cell in self.cells],
            **({"repeats": self.repeats} if self.repeats else {}),
        }
        write_json(self.paths.sweep, masked(content))


def merge_duplicates(plans: Sequence[Plan | None]) -> dict[int, int]:
    """Index of a job -> index of an earlier job that is the same run."""
    first: dict[str, int] = {}
    same = {n: first.setdefault(plan.run_id, n) for n, plan in enumerate(plans) if plan is not None}
    return {number: earlier for number, earlier in same.items() if earlier != number}


def sweep_exit_code(cells: Sequence[Cell]) -> int:
    """0 if every job that could run is ok; 2 if none could run; 1 also for a full disk."""
    outcomes = [Outcome[cell.outcome] for cell in cells if cell.outcome]
    ran = [o for o in outcomes if o not in (Outcome.refused, Outcome.skipped)]
    if any(o.exit_code == EXIT_RESUMABLE for o in ran) or len(outcomes) < len(cells):
        return EXIT_RESUMABLE
    if not ran:
        return EXIT_USER
    # Nothing is wrong with these: the same command runs them, some once memory is free.
    is_missing = any(cell.rule in FOR_WRITING | {CHANGED} for cell in cells)
    return EXIT_OK if all(o is Outcome.ok for o in ran) and not is_missing else EXIT_FAILED


POLL_S = 0.1
"""Between two looks at the worker."""


def show_until_over(live: LiveRun, view: RunView) -> None:
    """Show an attempt while it lasts; a signal for this process is passed on to it."""
    with forward_signals(live.ask, live.kill):
        while not live.is_over():
            view.update()
            time.sleep(POLL_S)


def run_single(plan: Plan, paths: RunPaths, head: Head | None = None) -> Record:
    """Run, or continue, the plan in its folder, and show it; errors as of `launch_attempt`."""
    with open_view(paths, plan.steps.total) as view:
        live = launch_attempt(plan, paths, head, 1 if ranks_are_started() else None)
        try:
            show_until_over(live, view)
        finally:
            record = live.finish()
        view.update(last=True)
    return record
