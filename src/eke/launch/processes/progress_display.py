"""A sweep while it runs: a live table on a terminal, a line for each event elsewhere."""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from eke.common.paths import RunPaths
from eke.common.streams import printable, speak, unfiltered
from eke.common.text import format_number, format_seconds
from eke.launch.processes.follow import Tail, newest_step
from eke.launch.processes.run_dir import untracked
from eke.launch.processes.sweep import Job
from eke.plan.record import Outcome, metrics

REFRESH_S = 0.5
"""Between two looks at the runs' metrics."""

NEWS_S = 60.0
"""Between two lines about running runs where there is no terminal."""


class Board(Protocol):
    """Where a sweep is shown."""

    def started(self, job: Job) -> None:
        """A run has been started."""
        ...

    def ended(self, job: Job) -> None:
        """A run is done with, for now at least."""
        ...

    def update(self, jobs: Sequence[Job]) -> None:
        """Time has passed."""
        ...

    def note(self, text: str) -> None:
        """Something concerns all runs."""
        ...


@dataclass
class Progress:
    """How far one run is, read from its metrics as they grow."""

    tail: Tail
    step: int = 0
    loss: float | None = None
    step_s: float | None = None

    def read(self) -> None:
        """Take in what has been written since the last time."""
        row = newest_step(self.tail.lines())
        if row is None:
            return
        self.step = int(row[metrics.STEP])
        loss, seconds = row[metrics.LOSS], row.get(metrics.STEP_TIME)
        self.loss = loss if isinstance(loss, int | float) else None
        self.step_s = seconds if isinstance(seconds, int | float) else None

    def left_s(self, total: int) -> float | None:
        """Seconds to the last step, by the newest step's time."""
        return None if self.step_s is None else self.step_s * max(0, total - self.step)


@dataclass
class Followed:
    """The progress of all running jobs."""

    of: dict[int, Progress] = field(default_factory=dict)

    def follow(self, job: Job) -> None:
        """From its start on; what an earlier attempt wrote is where it continues."""
        tail = Tail(RunPaths(Path(job.live.place.paths.folder)).metrics) if job.live else None
        if tail is not None:
            tail.position = 0
            self.of[job.number] = Progress(tail)

    def read(self, jobs: Sequence[Job]) -> None:
        """Look at those that run."""
        for job in jobs:
            if job.live is not None and job.number in self.of:
                self.of[job.number].read()

    def columns(self, job: Job) -> tuple[str, str, str, str]:
        """Step, loss, time of a step and time left; empty what is not known yet."""
        progress = self.of[job.number]
        left = progress.left_s(job.plan.steps.total)
        return (
            f"{progress.step}/{job.plan.steps.total}",
            "" if progress.loss is None else f"{progress.loss:.4f}",
            "" if progress.step_s is None else format_seconds(progress.step_s),
            "" if left is None else format_seconds(left),
        )


def counts(jobs: Sequence[Job]) -> str:
    """How many runs are where: `3 ok, 1 crashed, 2 running, 5 waiting`."""
    ended = Counter(job.outcome.name for job in jobs if job.outcome)
    parts = [f"{ended[o.name]} {o.name}" for o in Outcome if ended[o.name]]
    running = sum(job.live is not None for job in jobs)
    waiting = sum(job.is_waiting() for job in jobs)
    parts += [f"{running} running"] if running else []
    parts += [f"{waiting} waiting"] if waiting else []
    return ", ".join(parts)


def left_s(jobs: Sequence[Job], now: float) -> float | None:
    """Seconds until the whole sweep is done, if all runs last as long as those that ended here."""
    lasted = [job.lasted_s for job in jobs if job.outcome and job.lasted_s]
    running = [job for job in jobs if job.live is not None]
    if not lasted or not running:
        return None
    mean = sum(lasted) / len(lasted)
    ahead = sum(max(0.0, mean - (now - job.started)) for job in running)
    return (ahead + mean * sum(job.is_waiting() for job in jobs)) / len(running)


class LineBoard:
    """One line for each event."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.followed = Followed()
        self.news = time.monotonic()
        self.told: dict[int, str] = {}

    def started(self, job: Job) -> None:
        """Say where a run has been started."""
        self.followed.follow(job)
        self._say(job, f"started on {job.where}: {job.label}   {job.folder}")

    def ended(self, job: Job) -> None:
        """Say how a run ended."""
        self._say(job, f"{describe_end(job)}: {job.label}")

    def update(self, jobs: Sequence[Job]) -> None:
        """Report current watchers and, periodically, the progress of the runs."""
        for job in jobs:
            if job.waiting_for and not any(j.live for j in jobs):
                if self.told.get(0) != job.waiting_for:
                    self.told[0] = job.waiting_for
                    self._say(job, f"waits: {job.waiting_for}")
                break
        if time.monotonic() - self.news < NEWS_S:
            return
        self.news = time.monotonic()
        self.followed.read(jobs)
        for job in jobs:
            if job.live is not None:
                step, loss, _, left = self.followed.columns(job)
                parts = [f"step {step}", loss and f"loss {loss}", left and f"{left} left"]
                self._say(job, ", ".join(part for part in parts if part))

    def note(self, text: str) -> None:
        """A separate line."""
        speak(text)

    def _say(self, job: Job, text: str) -> None:
        self.note(f"[{job.number + 1}/{self.total}] {text}")


class TableBoard:
    """A table of what runs, below the lines of what has ended."""

    def __init__(self, total: int, live: Any) -> None:
        self.total, self.live = total, live
        self.followed = Followed()
        self.shown = 0.0

    def started(self, job: Job) -> None:
        """Follow a run."""
        self.followed.follow(job)

    def ended(self, job: Job) -> None:
        """Leave a line above the table."""
        from rich.text import Text

        line = f"[{job.number + 1}/{self.total}] {describe_end(job)}: {job.label}"
        self.live.console.print(Text(printable(line)))

    def note(self, text: str) -> None:
        """A line above the table."""
        from rich.text import Text

        self.live.console.print(Text(printable(text)))

    def update(self, jobs: Sequence[Job]) -> None:
        """Draw the table anew."""
        now = time.monotonic()
        if now - self.shown < REFRESH_S:
            return
        self.shown = now
        self.followed.read(jobs)
        self.live.update(self._table(jobs, now), refresh=True)

    def _table(self, jobs: Sequence[Job], now: float) -> Any:
        from rich.table import Table

        left = left_s(jobs, now)
        caption = counts(jobs) + (f"; about {format_seconds(left)} left" if left else "")
        table = Table(caption=caption, caption_justify="left", box=None, pad_edge=False)
        for name in ("run", "device", "step", "loss", "a step", "left", "what differs"):
            table.add_column(name, no_wrap=name != "what differs")
        for job in jobs:
            if job.live is not None:
                number = f"{job.number + 1}/{self.total}"
                table.add_row(number, job.where, *self.followed.columns(job), job.label)
        waiting = next((job for job in jobs if job.waiting_for), None)
        if waiting is not None and not any(job.live for job in jobs):
            table.add_row(f"{waiting.number + 1}/{self.total}", "waits", *[""] * 4,
                          waiting.waiting_for)  # fmt: skip
        return table


def describe_end(job: Job) -> str:
    """Short description of a run's end."""
    if job.outcome is None:
        last = job.record.outcome if job.record else "ended"
        steps = f" after {format_number(job.record.steps_done, 'step')}" if job.record else ""
        return f"{last}{steps}, tried again"
    if job.reused:
        other = untracked(job.record, job.plan, job.folder) if job.record else ""
        return f"{job.outcome.name}, answered from its record{other}"
    lasted = f" in {format_seconds(job.lasted_s)}" if job.lasted_s else ""
    return f"{job.outcome.name}{lasted}"


@contextmanager
def open_board(total: int) -> Iterator[Board]:
    """A table on a terminal, plain lines elsewhere.

    Args:
        total: jobs of the sweep.
    """
    if not sys.stderr.isatty():
        yield LineBoard(total)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(file=unfiltered(sys.stderr), highlight=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield TableBoard(total, live)
