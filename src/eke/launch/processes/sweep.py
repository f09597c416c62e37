"""Jobs of a sweep, its file `sweep.json`, and a single run in the foreground."""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError
from eke.common.files import make_private_dir, write_json
from eke.common.masking import masked
from eke.common.paths import RunPaths, SweepPaths, user_path
from eke.common.process_env import ranks_are_started
from eke.common.text import format_seconds
from eke.config.schema import LAUNCH_GROUPS, Config
from eke.config.schema.codec import make_converter
from eke.launch.devices import DeviceLease
from eke.launch.processes.follow import RunView, open_view
from eke.launch.processes.multi_node import Coordinator, launch_attempt
from eke.launch.processes.run_attempt import RunAttempt
from eke.launch.processes.worker_process import forward_signals
from eke.plan.identity import meaningful
from eke.plan.planner import Plan
from eke.plan.record import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, EXIT_USER, Outcome, Record

MAX_CRASHES = 2
"""Number of crashes in a row without progress after which a run is not started again."""

MAX_INTERRUPTIONS = 5
"""Number of external stops in a row without progress after which a run is not started again."""

RETRYABLE = (Outcome.oom.name, Outcome.diverged.name, Outcome.crashed.name)
"""Outcomes that `eke retry` reruns."""

CHANGED = "as_planned"
"""Rule of a run rejected by its worker because its input or software changed after planning."""

_RETRIED = {
    Outcome.crashed: MAX_CRASHES,
    **dict.fromkeys((Outcome.preempted, Outcome.timeout), MAX_INTERRUPTIONS),
}


def training_and_startup_s(
    record: Record, before: Record | None, elapsed_s: float
) -> tuple[float, float]:
    """Return the training and start-up seconds of an attempt."""
    trained_s = (before and before.timing.train_s) or 0.0
    gained = max(0.0, (record.timing.train_s or 0.0) - trained_s)
    started = record.timing.startup_s
    return gained, max(0.0, elapsed_s - gained) if started is None else started


def why_not_restart(worths: Sequence[Sequence[float]], number: int = MAX_INTERRUPTIONS) -> str:
    """Return why the newest `number` attempts are not worth another one, "" if they are."""
    gained, started = (sum(w[k] for w in worths[-number:]) for k in (0, 1))
    if not 0 < number <= len(worths) or not 0 < gained < started:
        return ""
    times = f"{format_seconds(gained)} and took {format_seconds(started)} to start"
    return f"{number} attempts in a row trained for {times}. Repeat the command to resume"


@dataclass(eq=False)
class Job:
    """One run of a sweep."""

    number: int
    """Index of its first job in the sweep, from 0."""
    label: str
    """Overrides that distinguish the run from the others."""
    plan: Plan
    cells: list[int] = field(default_factory=list)
    """Indices of all of the sweep's jobs that are this run, the first one first."""
    outcome: Outcome | None = None
    """Final outcome. None while the run waits or runs."""
    reason: str = ""
    """Why it failed or was not started."""
    rule: str = ""
    """Rule that kept it from starting. Empty without one, or without its identifier."""
    record: Record | None = None
    folder: str = ""
    reused: bool = False
    """True if the record is of an earlier command."""
    live: Any = None
    """The current attempt, `RunAttempt` or `ClusterRun`. None if there is none."""
    grant: DeviceLease | None = None
    pid: int = 0
    """Process id of the worker or its agent. 0 if it is on another machine."""
    where: str = ""
    """Devices or node, for display."""
    started: float = 0.0
    """time.monotonic() at the start of the current attempt."""
    lasted_s: float = 0.0
    not_before: float = 0.0
    """time.monotonic() of the earliest next attempt."""
    overtaken: int = 0
    """Number of later runs that started while this one waited for devices."""
    waiting_for: str = ""
    """Reason for waiting, for display. Empty if none."""
    tries: dict[Outcome, int] = field(default_factory=dict)
    """Number of attempts without progress, by outcome."""
    steps_before: int = 0
    worths: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cells = self.cells or [self.number]

    @property
    def kind(self) -> str:
        """Kind of its devices: `cuda` or `cpu`."""
        return self.plan.device.kind

    @property
    def num_devices(self) -> int:
        """Number of devices of the run."""
        return self.plan.batch.world_size * self.plan.batch.devices

    def is_waiting(self) -> bool:
        """Return whether the job can be started."""
        return self.outcome is None and self.live is None

    def settle(self, record: Record) -> bool:
        """Take the record of an ended attempt. Return whether another attempt should follow."""
        outcome = Outcome[record.outcome]
        if record.steps_done > self.steps_before:
            self.tries.clear()
        self.steps_before = record.steps_done
        elapsed_s = time.monotonic() - self.started if self.started else 0.0
        self.worths.append(training_and_startup_s(record, self.record, elapsed_s))
        self.tries[outcome] = self.tries.get(outcome, 0) + 1
        self.record = record
        vain = why_not_restart(self.worths) if outcome in _RETRIED else ""
        if not vain and self.tries[outcome] < _RETRIED.get(outcome, 0):
            return True
        failure = record.failure
        # A worker that rejects a configuration leaves a traceback.
        changed = outcome is Outcome.refused and not (failure and failure.traceback)
        self.end(outcome, vain or (failure.message if failure else ""), CHANGED if changed else "")
        return False

    def end(self, outcome: Outcome, reason: str = "", rule: str = "") -> None:
        """Set the final outcome."""
        self.outcome, self.reason, self.rule, self.waiting_for = outcome, reason, rule, ""


FOR_WRITING = frozenset({"runs_has_space", "runs_writable"})
"""Rules that only apply to runs with files to write. Such a run could run elsewhere."""

WRITE_S = 1.0
"""Shortest interval between two writes of a sweep's file, in seconds."""


@dataclass
class SweepRun:
    """One job of a sweep in its file. Fields as in `Job`."""

    overrides: tuple[str, ...]
    run_id: str = ""
    """Empty if the job was rejected before it had one."""
    folder: str = ""
    outcome: str = ""
    """Name of an Outcome. Empty until the run has ended."""
    reason: str = ""
    reused: bool = False
    row: str = ""
    """Name of its row in the sweep's definition. Empty without rows."""
    round: int = 0
    """Number of the repeat: the key `repeat`."""
    rule: str = ""

    def reject(self, error: ConfigError) -> None:
        """Mark the job as invalid, or as not possible now, with the first rule that rejects it."""
        self.run_id = ""
        outcome = Outcome.crashed if error.is_passing else Outcome.refused
        self.outcome, self.reason = outcome.name, error.short()
        self.rule = error.rule

    def take(self, job: Job) -> None:
        """Copy the state of the run."""
        self.folder, self.reused, self.rule = job.folder, job.reused, job.rule
        self.outcome = job.outcome.name if job.outcome else ""
        self.reason, log = job.reason, RunPaths(Path(job.folder)).log
        if job.reason and job.record is not None and log.exists():
            self.reason = f"{job.reason} ({log})"


_HOW = (*(f"{group}{end}" for group in LAUNCH_GROUPS for end in ".="), "plan_only=")
"""Prefixes of overrides that affect the launch and not the set of runs."""


def sweep_id(
    cells: Sequence[tuple[str, ...]], own: Sequence[Config] = (), rule: Sequence[str] = ()
) -> str:
    """Return 12 hex digits, the same for the same command with any launcher.

    `cells`: overrides of each job. `own`: their configurations, if these depend on the user's
    files (`--config-dir`). `rule`: rule of `sweep.repeats=auto`, with the first round's cells.
    """
    texts: list[Any] = [[t for t in cell if not t.startswith(_HOW)] for cell in cells]
    texts += [meaningful(make_converter().unstructure(config)) for config in own]
    texts += [list(rule)] if rule else []
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12]


def sweep_paths(runs: str, identity: str) -> SweepPaths:
    """Return the folder of the sweep's file. The run folders are its siblings."""
    return SweepPaths(user_path(runs) / f"sweep-{identity}")


class SweepFile:
    """The file sweep.json, updated while the sweep runs. Records take precedence over it."""

    def __init__(
        self, paths: SweepPaths, command: Sequence[str], cells: Sequence[SweepRun], name: str = ""
    ) -> None:
        self.paths, self.command, self.cells, self.name = paths, command, cells, name
        self.problem = ""
        self.repeats: dict[str, Any] = {}
        """Rule and decisions of `sweep.repeats=auto`. Empty for a fixed number of repeats."""
        self._is_current, self._written = False, 0.0

    def note(self, job: Job) -> None:
        """Copy the new state of a run."""
        for number in job.cells:
            self.cells[number].take(job)
        self._is_current = False

    def note_rounds(self, found: dict[str, Any]) -> None:
        """Write the decisions of a round of `sweep.repeats=auto`."""
        self.repeats, self._is_current = found, False
        self.flush(at_once=True)

    def flush(self, at_once: bool = False) -> None:
        """Write the file if it changed, at most once per WRITE_S. Set `problem` if that failed."""
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
        make_private_dir(self.paths.folder)
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
    """Return the index of the first identical run, by index of each duplicate."""
    first: dict[str, int] = {}
    same = {n: first.setdefault(plan.run_id, n) for n, plan in enumerate(plans) if plan is not None}
    return {number: earlier for number, earlier in same.items() if earlier != number}


def sweep_exit_code(cells: Sequence[SweepRun]) -> int:
    """Return 0 if every job that could run is ok, 2 if none could run, 1 also for a full disk."""
    outcomes = [Outcome[cell.outcome] for cell in cells if cell.outcome]
    ran = [o for o in outcomes if o not in (Outcome.refused, Outcome.skipped)]
    if any(o.exit_code == EXIT_RESUMABLE for o in ran) or len(outcomes) < len(cells):
        return EXIT_RESUMABLE
    if not ran:
        return EXIT_USER
    # These runs are valid: the same command starts them, some only with more free memory.
    is_missing = any(cell.rule in FOR_WRITING | {CHANGED} for cell in cells)
    return EXIT_OK if all(o is Outcome.ok for o in ran) and not is_missing else EXIT_FAILED


POLL_S = 0.1


def show_until_over(live: RunAttempt, view: RunView) -> None:
    """Show an attempt until it ends. Forward signals of this process to it."""
    with forward_signals(live.ask, live.kill):
        while not live.is_over():
            view.update()
            time.sleep(POLL_S)


def run_single(plan: Plan, paths: RunPaths, head: Coordinator | None = None) -> Record:
    """Start or resume the plan in its folder and show it. Errors as in `launch_attempt`."""
    with open_view(paths, plan.steps.total, plan.config.train.log_every) as view:
        live = launch_attempt(plan, paths, head, 1 if ranks_are_started() else None)
        try:
            show_until_over(live, view)
        finally:
            record = live.finish()
        view.update(last=True)
    return record
