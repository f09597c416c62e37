"""Live view of a sweep: a table on a terminal, else a line for each event. Both on stderr."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eke.common.output import write_line
from eke.common.paths import RunPaths
from eke.common.screen import is_quiet, width, wrap
from eke.common.text import format_number, format_seconds
from eke.launch.processes.follow import LOG_INTERVAL_S, REFRESH_S, LiveText, newest_step, open_live
from eke.launch.processes.run_dir import tracker_change_note
from eke.launch.processes.runs_table import (
    RUNNING,
    WAITING,
    RunStatus,
    progress_lines,
    progress_of,
    render_runs,
)
from eke.launch.processes.sweep import Job, SweepFile


class ProgressTable:
    """The runs of a sweep while they run."""

    def __init__(self, file: SweepFile, table: LiveText | None = None) -> None:
        """Take the sweep's file, and a live text on a terminal."""
        self.file, self.table = file, table
        self.pause_s = LOG_INTERVAL_S if table is None else REFRESH_S
        self.began = time.monotonic()
        self.shown = self.began if table is None else 0.0
        self.told_wait = ""

    def started(self, job: Job) -> None:
        """Print the device of a started run, unless the table shows it."""
        if self.table is None:
            self._say(job, f"started on {job.where}: {job.label}   {job.folder}")

    def ended(self, job: Job) -> None:
        """Print how a run or an attempt ended, unless the table shows it."""
        if self.table is None or job.outcome is None:
            self._say(job, f"{_describe_end(job)}: {job.label}")

    def note(self, text: str) -> None:
        """Print a line that concerns the entire sweep."""
        if not is_quiet():
            lines = [text] if self.table is None else wrap(text, width(sys.stderr), other="  ")
            write_line("\n".join(lines), sys.stderr)

    def update(self, jobs: Sequence[Job]) -> None:
        """Show the progress of the runs, or the reason for waiting, at intervals of `pause_s`."""
        # A job that waits for another process, shown if no job is running.
        now, idle = time.monotonic(), all(job.live is None for job in jobs)
        waiting = next((job for job in jobs if idle and job.waiting_for), None)
        if self.table is None and waiting is not None and waiting.waiting_for != self.told_wait:
            self.told_wait = waiting.waiting_for
            self._say(waiting, f"waiting: {waiting.waiting_for}")
        if now - self.shown < self.pause_s:
            return
        self.shown = now
        if self.table is not None:
            self.table.draw(self._render(jobs, now, self.table))
            return
        for job in (each for each in jobs if each.live is not None):
            newest = newest_step(RunPaths(Path(job.folder)))
            self._say(job, newest.text(job.plan.steps.total))

    def _say(self, job: Job, text: str) -> None:
        self.note(f"[{job.number + 1}/{len(self.file.cells)}] {text}")

    def _render(self, jobs: Sequence[Job], now: float, table: LiveText) -> str:
        standings = [self._status(job) for job in jobs]
        lines = progress_lines(standings, now - self.began, table.stream)
        room = max(3, table.height - len(lines) - 4)
        return "\n".join([*lines, "", *render_runs(standings, room, stream=table.stream)])

    def _status(self, job: Job) -> RunStatus:
        """Return the state of a run, without reading the files of a run that has ended."""
        # The job's other cells are the same run.
        cell, paths = self.file.cells[job.cells[0]], RunPaths(Path(job.folder))
        state = job.outcome.name if job.outcome else RUNNING if job.live is not None else WAITING
        known: dict[str, Any] = {}
        if state == RUNNING:
            known = newest_step(paths)._asdict()
        elif job.outcome and job.record:
            known = progress_of(job.record)
        return RunStatus(
            paths, job.label, state, total=job.plan.steps.total, overrides=cell.overrides,
            where=job.where if state == RUNNING else job.waiting_for, row=cell.row, **known,
        )  # fmt: skip


def _describe_end(job: Job) -> str:
    if job.outcome is None:
        last = job.record.outcome if job.record else "ended"
        steps = f" after {format_number(job.record.steps_done, 'step')}" if job.record else ""
        return f"{last}{steps}, trying again"
    if job.reused:
        other = tracker_change_note(job.record, job.plan, job.folder) if job.record else ""
        return f"{job.outcome.name}, answered from its record{other}"
    lasted = f" in {format_seconds(job.lasted_s)}" if job.lasted_s else ""
    return f"{job.outcome.name}{lasted}"


@contextmanager
def open_board(file: SweepFile) -> Iterator[ProgressTable]:
    """Open a table on a terminal, else plain lines. With `-q`, show neither."""
    with open_live(sys.stderr) as live:
        yield ProgressTable(file, live)
