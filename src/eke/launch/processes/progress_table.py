"""Live view of a sweep: a table on a terminal, else a line for each event."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eke.common.output import write_line
from eke.common.paths import RunPaths
from eke.common.text import format_number, format_seconds
from eke.launch.processes.follow import LOG_INTERVAL_S, REFRESH_S, newest_step, print_line, terminal
from eke.launch.processes.run_dir import tracker_change_note
from eke.launch.processes.sweep import Job
from eke.plan.record import Outcome


class ProgressTable:
    """Lines about the events of a sweep, above a table of the running runs on a terminal."""

    def __init__(self, total: int, table: Any = None) -> None:
        """Take the number of the sweep's jobs, and rich's `Live` on a terminal."""
        self.total, self.table = total, table
        self.pause_s = LOG_INTERVAL_S if table is None else REFRESH_S
        self.shown = time.monotonic() if table is None else 0.0
        self.told_wait = ""

    def started(self, job: Job) -> None:
        """Print the device of a started run, unless the table shows it."""
        if self.table is None:
            self._say(job, f"started on {job.where}: {job.label}   {job.folder}")

    def ended(self, job: Job) -> None:
        """Print how a run or an attempt ended."""
        self._say(job, f"{_describe_end(job)}: {job.label}")

    def note(self, text: str) -> None:
        """Print a line that concerns the entire sweep."""
        if self.table is None:
            write_line(text)
        else:
            print_line(text, self.table)

    def update(self, jobs: Sequence[Job]) -> None:
        """Show the progress of the runs, or the reason for waiting, at intervals of `pause_s`."""
        now, waiting = time.monotonic(), _waiting_job(jobs)
        if self.table is None and waiting is not None and waiting.waiting_for != self.told_wait:
            self.told_wait = waiting.waiting_for
            self._say(waiting, f"waiting: {waiting.waiting_for}")
        if now - self.shown < self.pause_s:
            return
        self.shown = now
        if self.table is not None:
            self.table.update(self._draw(jobs, now), refresh=True)
            return
        for job in (each for each in jobs if each.live is not None):
            step, loss, _, left = _progress_columns(job)
            parts = [f"step {step}", loss and f"loss {loss}", left and f"{left} left"]
            self._say(job, ", ".join(part for part in parts if part))

    def _say(self, job: Job, text: str) -> None:
        self.note(f"[{self._number(job)}] {text}")

    def _number(self, job: Job) -> str:
        return f"{job.number + 1}/{self.total}"

    def _draw(self, jobs: Sequence[Job], now: float) -> Any:
        from rich.table import Table

        caption = _counts(jobs, _left_s(jobs, now))
        table = Table(caption=caption, caption_justify="left", box=None, pad_edge=False)
        for name in ("run", "device", "step", "loss", "step time", "left", "overrides"):
            table.add_column(name, no_wrap=name != "overrides")
        running = [job for job in jobs if job.live is not None]
        rows = [(job, job.where, _progress_columns(job), job.label) for job in running]
        if (waiting := _waiting_job(jobs)) is not None:
            rows.append((waiting, "waiting", ("",) * 4, waiting.waiting_for))
        for job, where, columns, text in rows:
            table.add_row(self._number(job), where, *columns, text)
        return table


def _waiting_job(jobs: Sequence[Job]) -> Job | None:
    """Return the first job that waits for another process if no job is running."""
    idle = all(job.live is None for job in jobs)
    return next((job for job in jobs if idle and job.waiting_for), None)


def _progress_columns(job: Job) -> tuple[str, str, str, str]:
    """Return step, loss, step time and time left, "" for unknown values."""
    return newest_step(RunPaths(Path(job.folder))).texts(job.plan.steps.total)


def _counts(jobs: Sequence[Job], left: float | None = None) -> str:
    """Return the number of runs by state: `3 ok, 2 running (22 s left), 5 waiting`."""
    ended = Counter(job.outcome.name for job in jobs if job.outcome)
    numbers = {outcome.name: ended[outcome.name] for outcome in Outcome}
    numbers["running"] = sum(job.live is not None for job in jobs)
    numbers["waiting"] = sum(job.is_waiting() for job in jobs)
    texts = {name: f"{number} {name}" for name, number in numbers.items() if number}
    if left:
        texts["running"] += f" ({format_seconds(left)} left)"
    return ", ".join(texts.values())


def _left_s(jobs: Sequence[Job], now: float) -> float | None:
    """Return the seconds until the sweep's end, by the mean duration of its finished runs."""
    lasted = [job.lasted_s for job in jobs if job.outcome and job.lasted_s]
    running = [job for job in jobs if job.live is not None]
    if not lasted or not running:
        return None
    mean = sum(lasted) / len(lasted)
    ahead = sum(max(0.0, mean - (now - job.started)) for job in running)
    return (ahead + mean * sum(job.is_waiting() for job in jobs)) / len(running)


def _describe_end(job: Job) -> str:
    """Return a short description of a run's end."""
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
def open_board(total: int) -> Iterator[ProgressTable]:
    """Open a table on a terminal, else plain lines. `total`: number of the sweep's jobs."""
    if (console := terminal()) is None:
        yield ProgressTable(total)
        return
    from rich.live import Live

    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield ProgressTable(total, live)
