"""Live view of runs, and the processes that watch a sweep.

On a terminal a bar or a table, elsewhere a line for each event.
"""

import contextlib
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eke.common.files import (
    READ_LIMIT,
    is_locked,
    last_bytes,
    open_file,
    open_to_read,
    own_folder,
    try_lock,
)
from eke.common.paths import RunPaths, SweepPaths
from eke.common.streams import printable, speak, unfiltered
from eke.common.text import format_number, format_seconds
from eke.launch.processes.run_dir import untracked
from eke.plan.record import Outcome, metrics

if TYPE_CHECKING:
    from eke.launch.processes.sweep import Job

TAIL_BYTES = 4096
"""Of metrics.jsonl: more than a row has."""

REFRESH_S = 0.5
"""Between two looks at the runs' metrics."""

NEWS_S = 60.0
"""Between two lines about running runs where there is no terminal."""


class Tail:
    """New complete lines of a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = path.stat().st_size if path.exists() else 0

    def lines(self, last: bool = False) -> list[str]:
        """Lines since the last call; with `last`, an unfinished one too."""
        try:
            with open(open_to_read(self.path), "rb") as file:
                file.seek(self.position)
                content = file.read(READ_LIMIT)
        except OSError:
            return []
        if not last and len(content) < READ_LIMIT:
            content = content[: content.rfind(b"\n") + 1]
        self.position += len(content)
        return content.decode(errors="replace").splitlines()


class NewestStep(NamedTuple):
    """How far a run is, by its newest training step."""

    step: int = 0
    loss: float | None = None
    """None where it is no number."""
    step_s: float | None = None
    """Seconds that the step took."""

    def left_s(self, total: int) -> float | None:
        """Seconds to the last step, by the newest step's time."""
        return None if self.step_s is None else self.step_s * max(0, total - self.step)

    def texts(self, total: int) -> tuple[str, str, str, str]:
        """Step, loss, time of a step and time left, as tables show them; empty where unknown."""
        left = self.left_s(total)
        return (
            f"{self.step}/{total}" if total else "",
            "" if self.loss is None else f"{self.loss:.4f}",
            "" if self.step_s is None else format_seconds(self.step_s),
            "" if left is None else format_seconds(left),
        )


def newest_step(paths: RunPaths) -> NewestStep:
    """The newest step in a run's metrics; step 0 while there is none."""
    try:
        lines = last_bytes(paths.metrics, TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return NewestStep()
    for line in reversed(lines):
        row = metrics.parse_row(line)
        if row and metrics.LOSS in row and metrics.STEP in row:
            loss, seconds = (as_number(row.get(key)) for key in (metrics.LOSS, metrics.STEP_TIME))
            return NewestStep(int(row[metrics.STEP]), loss, seconds)
    return NewestStep()


def as_number(value: Any) -> float | None:
    """None for what is absent or no number: a loss that is not finite is written as a word."""
    return value if isinstance(value, int | float) else None


class RunView:
    """The log of a run line by line, above a progress bar if there is one."""

    def __init__(self, paths: RunPaths, bar: Any = None) -> None:
        self.paths, self.bar = paths, bar
        self.log = Tail(paths.log)

    def update(self, last: bool = False) -> None:
        """Print new lines of the log, and move the bar to the newest step."""
        for line in self.log.lines(last):
            _print_line(line, self.bar)
        if self.bar is None:
            return
        step, loss, _ = newest_step(self.paths)
        text = "" if loss is None else f"loss {loss:.4f}"
        self.bar.update(self.bar.task_ids[0], completed=step, loss=text)


def _print_line(text: str, above: Any = None) -> None:
    """Print a line above what rich redraws, else to stderr."""
    if above is None:
        speak(text, sys.stderr)
        return
    from rich.text import Text

    above.console.print(Text(printable(text)))


def _terminal() -> Any:
    """A console of rich on stderr; None where that is no terminal."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console

    return Console(file=unfiltered(sys.stderr), highlight=False)


@contextmanager
def open_view(paths: RunPaths, total_steps: int) -> Iterator[RunView]:
    """A progress bar on a terminal, plain lines elsewhere."""
    if (console := _terminal()) is None:
        yield RunView(paths)
        return
    from rich import progress

    columns = (
        "training", progress.BarColumn(), progress.MofNCompleteColumn(), "{task.fields[loss]}",
        progress.TimeElapsedColumn(), "left", progress.TimeRemainingColumn(),
    )  # fmt: skip
    with progress.Progress(*columns, console=console, transient=True) as bar:
        bar.add_task("run", total=total_steps, loss="")
        yield RunView(paths, bar)


class Board:
    """Lines about the events of a sweep, above a table of what runs if there is a terminal."""

    def __init__(self, total: int, table: Any = None) -> None:
        """Jobs of the sweep, and rich's `Live` on a terminal."""
        self.total, self.table = total, table
        self.pause_s = NEWS_S if table is None else REFRESH_S
        self.shown = time.monotonic() if table is None else 0.0
        self.told_wait = ""

    def started(self, job: "Job") -> None:
        """Say where a run has been started, unless the table shows it."""
        if self.table is None:
            self._say(job, f"started on {job.where}: {job.label}   {job.folder}")

    def ended(self, job: "Job") -> None:
        """Say how a run ended, for now at least."""
        self._say(job, f"{describe_end(job)}: {job.label}")

    def note(self, text: str) -> None:
        """Say something that concerns all runs."""
        if self.table is None:
            speak(text)
        else:
            _print_line(text, self.table)

    def update(self, jobs: "Sequence[Job]") -> None:
        """Show, now and then, how far the runs are, or what all of them wait for."""
        now, waiting = time.monotonic(), waiting_job(jobs)
        if self.table is None and waiting is not None and waiting.waiting_for != self.told_wait:
            self.told_wait = waiting.waiting_for
            self._say(waiting, f"waits: {waiting.waiting_for}")
        if now - self.shown < self.pause_s:
            return
        self.shown = now
        if self.table is not None:
            self.table.update(self._draw(jobs, now), refresh=True)
            return
        for job in (each for each in jobs if each.live is not None):
            step, loss, _, left = progress_columns(job)
            parts = [f"step {step}", loss and f"loss {loss}", left and f"{left} left"]
            self._say(job, ", ".join(part for part in parts if part))

    def _say(self, job: "Job", text: str) -> None:
        self.note(f"[{self._number(job)}] {text}")

    def _number(self, job: "Job") -> str:
        return f"{job.number + 1}/{self.total}"

    def _draw(self, jobs: "Sequence[Job]", now: float) -> Any:
        from rich.table import Table

        left = left_s(jobs, now)
        caption = counts(jobs) + (f"; about {format_seconds(left)} left" if left else "")
        table = Table(caption=caption, caption_justify="left", box=None, pad_edge=False)
        for name in ("run", "device", "step", "loss", "a step", "left", "what differs"):
            table.add_column(name, no_wrap=name != "what differs")
        running = [job for job in jobs if job.live is not None]
        rows = [(job, job.where, progress_columns(job), job.label) for job in running]
        if (waiting := waiting_job(jobs)) is not None:
            rows.append((waiting, "waits", ("",) * 4, waiting.waiting_for))
        for job, where, columns, text in rows:
            table.add_row(self._number(job), where, *columns, text)
        return table


def waiting_job(jobs: "Sequence[Job]") -> "Job | None":
    """The first job that waits for another process, while none runs."""
    idle = all(job.live is None for job in jobs)
    return next((job for job in jobs if idle and job.waiting_for), None)


def progress_columns(job: "Job") -> tuple[str, str, str, str]:
    """Step, loss, time of a step and time left; empty what is not known yet."""
    return newest_step(RunPaths(Path(job.folder))).texts(job.plan.steps.total)


def counts(jobs: "Sequence[Job]") -> str:
    """How many runs are where: `3 ok, 1 crashed, 2 running, 5 waiting`."""
    ended = Counter(job.outcome.name for job in jobs if job.outcome)
    numbers = {outcome.name: ended[outcome.name] for outcome in Outcome}
    numbers["running"] = sum(job.live is not None for job in jobs)
    numbers["waiting"] = sum(job.is_waiting() for job in jobs)
    return ", ".join(f"{number} {name}" for name, number in numbers.items() if number)


def left_s(jobs: "Sequence[Job]", now: float) -> float | None:
    """Seconds until the whole sweep is done, if all runs last as long as those that ended here."""
    lasted = [job.lasted_s for job in jobs if job.outcome and job.lasted_s]
    running = [job for job in jobs if job.live is not None]
    if not lasted or not running:
        return None
    mean = sum(lasted) / len(lasted)
    ahead = sum(max(0.0, mean - (now - job.started)) for job in running)
    return (ahead + mean * sum(job.is_waiting() for job in jobs)) / len(running)


def describe_end(job: "Job") -> str:
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
    """A table on a terminal, plain lines elsewhere; `total`: jobs of the sweep."""
    if (console := _terminal()) is None:
        yield Board(total)
        return
    from rich.live import Live

    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield Board(total, live)


class Watcher(NamedTuple):
    """A process that starts what is left of a sweep, and the lock that it holds."""

    host: str
    process: str
    lock: Path


@contextmanager
def watching(paths: SweepPaths) -> Iterator[None]:
    """Be known as a process that starts what is left of a sweep.

    Where the folder cannot be written, or files have no locks, it is not: that stops no sweep.
    """
    lock = paths.watcher(socket.gethostname(), os.getpid())
    made = lock.with_name(f".new{lock.name}")
    with contextlib.ExitStack() as held:
        held.callback(_forget_killed, paths)  # also those killed together with this one
        with contextlib.suppress(OSError):
            own_folder(lock.parent)
            descriptor = open_file(made, os.O_RDWR | os.O_CREAT)
            held.callback(os.close, descriptor)
            held.callback(_forget, lock)
            held.callback(_forget, made)
            try_lock(descriptor)
            os.replace(made, lock)  # it is never seen unlocked and mistaken for a finished one
        _forget_killed(paths)
        yield


def _forget_killed(paths: SweepPaths) -> None:
    for left in paths.watchers():
        if not is_locked(left):
            _forget(left)


def _forget(lock: Path) -> None:
    with contextlib.suppress(OSError):
        lock.unlink(missing_ok=True)


def watchers_of(paths: SweepPaths) -> list[Watcher]:
    """Current watchers of a sweep; several may share its runs."""
    return [Watcher(*paths.who_watches(lock), lock) for lock in paths.watchers() if is_locked(lock)]


def watchers_in(folder: Path) -> list[Watcher]:
    """Watchers of the sweep in a folder, or of any sweep in its subfolders."""
    folders = [folder] if SweepPaths(folder).sweep.exists() else sorted(folder.glob("sweep-*"))
    return [watcher for each in folders for watcher in watchers_of(SweepPaths(each))]
