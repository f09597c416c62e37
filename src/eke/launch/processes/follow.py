"""Live view of a run (a bar on a terminal, else lines), and the processes that run a sweep."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from eke.common.files import (
    READ_LIMIT,
    is_locked,
    last_bytes,
    make_private_dir,
    open_file,
    open_to_read,
    try_lock,
)
from eke.common.output import printable, raw_stream, write_line
from eke.common.paths import RunPaths, SweepPaths
from eke.common.text import format_seconds
from eke.plan.record import IN_LOG, metrics

REFRESH_S = 0.5
"""Refresh interval of tables, in seconds."""

LOG_INTERVAL_S = 60.0
"""Interval between progress lines without a terminal, in seconds."""


class Tail:
    """New complete lines of a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = path.stat().st_size if path.exists() else 0

    def lines(self, last: bool = False) -> list[str]:
        """Return the lines since the last call, with `last` also an incomplete line."""
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
    """Progress of a run by its newest training step."""

    step: int = 0
    loss: float | None = None
    """None if it is not a number."""
    step_s: float | None = None

    def left_s(self, total: int) -> float | None:
        """Return the seconds to the last step, at the newest step's speed."""
        return None if self.step_s is None else self.step_s * max(0, total - self.step)

    def texts(self, total: int) -> tuple[str, str, str, str]:
        """Return step, loss, step time and time left for tables, "" for unknown values."""
        left = self.left_s(total)
        return (
            f"{self.step}/{total}" if total else "",
            "" if self.loss is None else f"{self.loss:.4f}",
            "" if self.step_s is None else format_seconds(self.step_s),
            "" if left is None else format_seconds(left),
        )


def newest_step(paths: RunPaths) -> NewestStep:
    """Return the newest step in a run's metrics, step 0 without one."""
    try:
        content = last_bytes(paths.metrics, 4096)  # longer than a row
    except OSError:
        return NewestStep()
    for line in reversed(content.decode(errors="replace").splitlines()):
        row = metrics.parse_row(line)
        if row and metrics.LOSS in row and metrics.STEP in row:
            loss, seconds = (as_number(row.get(key)) for key in (metrics.LOSS, metrics.STEP_TIME))
            return NewestStep(int(row[metrics.STEP]), loss, seconds)
    return NewestStep()


def as_number(value: Any) -> float | None:
    """Return a number, None for missing values and for words such as "nan"."""
    return value if isinstance(value, int | float) else None


class RunView:
    """The lines of a run's log, above a progress bar if there is one."""

    def __init__(self, paths: RunPaths, bar: Any = None) -> None:
        self.paths, self.bar = paths, bar
        self.log = Tail(paths.log)

    def update(self, last: bool = False) -> None:
        """Print new lines of the log, and move the bar to the newest step."""
        for line in self.log.lines(last):
            if not line.startswith(IN_LOG):
                print_line(line, self.bar)
        if self.bar is None:
            return
        step, loss, _ = newest_step(self.paths)
        text = "" if loss is None else f"loss {loss:.4f}"
        self.bar.update(self.bar.task_ids[0], completed=step, loss=text)


def print_line(text: str, above: Any = None) -> None:
    """Print a line above a table or bar of rich, else to stderr."""
    if above is None:
        write_line(text, sys.stderr)
        return
    from rich.text import Text

    above.console.print(Text(printable(text)))


def terminal() -> Any:
    """Return rich's console on stderr, None if stderr is not a terminal."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console

    return Console(file=raw_stream(sys.stderr), highlight=False)


@contextmanager
def open_view(paths: RunPaths, total_steps: int) -> Iterator[RunView]:
    """Open a progress bar on a terminal, else plain lines."""
    if (console := terminal()) is None:
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


class Watcher(NamedTuple):
    """A process that starts the remaining runs of a sweep, and its lock."""

    host: str
    process: str
    lock: Path


@contextmanager
def watching(paths: SweepPaths) -> Iterator[None]:
    """Register this process as a watcher of a sweep."""
    lock = paths.watcher(socket.gethostname(), os.getpid())
    made = lock.with_name(f".new{lock.name}")
    with contextlib.ExitStack() as held:
        held.callback(_forget_killed, paths)  # also watchers killed together with this one
        with contextlib.suppress(OSError):  # a sweep also runs without a folder or locks for this
            make_private_dir(lock.parent)
            descriptor = open_file(made, os.O_RDWR | os.O_CREAT)
            held.callback(os.close, descriptor)
            held.callback(_forget, lock)
            held.callback(_forget, made)
            try_lock(descriptor)
            os.replace(made, lock)  # never visible while unlocked
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
    """Return the current watchers of a sweep. Several may share its runs."""
    return [Watcher(*paths.who_watches(lock), lock) for lock in paths.watchers() if is_locked(lock)]


def watchers_in(folder: Path) -> list[Watcher]:
    """Return the watchers of the sweep in a folder, or of all sweeps in its subfolders."""
    folders = [folder] if SweepPaths(folder).sweep.exists() else sorted(folder.glob("sweep-*"))
    return [watcher for each in folders for watcher in watchers_of(SweepPaths(each))]
