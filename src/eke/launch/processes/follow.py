"""Progress of a running worker, and the processes that watch a sweep."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eke.common.files import READ_LIMIT, is_locked, open_file, open_to_read, own_folder, try_lock
from eke.common.paths import RunPaths, SweepPaths
from eke.common.streams import printable, speak, unfiltered
from eke.plan.record import metrics


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


class View(Protocol):
    """Where a run is shown."""

    def update(self, last: bool = False) -> None:
        """Show what is new."""
        ...


class PlainView:
    """The log, line by line."""

    def __init__(self, paths: RunPaths) -> None:
        self.log = Tail(paths.log)

    def update(self, last: bool = False) -> None:
        """Print new lines of the log."""
        for line in self.log.lines(last):
            speak(line, sys.stderr)


class BarView:
    """The log above a progress bar."""

    def __init__(self, paths: RunPaths, bar: Any, task: Any) -> None:
        self.log = Tail(paths.log)
        self.metrics = Tail(paths.metrics)
        self.bar, self.task = bar, task

    def update(self, last: bool = False) -> None:
        """Print new lines and move the bar to the newest step."""
        from rich.text import Text

        for line in self.log.lines(last):
            self.bar.console.print(Text(printable(line)))
        row = newest_step(self.metrics.lines())
        if row:
            self.bar.update(
                self.task,
                completed=row[metrics.STEP],
                loss=f"loss {row[metrics.LOSS]:.4f}" if _is_number(row[metrics.LOSS]) else "",
            )


def newest_step(lines: list[str]) -> metrics.Row | None:
    """The last row of a training step among some lines of metrics.jsonl."""
    for line in reversed(lines):
        row = metrics.parse_row(line)
        if row and metrics.LOSS in row and metrics.STEP in row:
            return row
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


@contextmanager
def open_view(paths: RunPaths, total_steps: int) -> Iterator[View]:
    """A progress bar on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield PlainView(paths)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    console = Console(file=unfiltered(sys.stderr), highlight=False)
    with Progress(*columns, console=console, transient=True) as bar:
        yield BarView(paths, bar, bar.add_task("run", total=total_steps, loss=""))


@dataclass(frozen=True)
class Watcher:
    """A process that starts what is left of a sweep."""

    host: str
    process: str
    lock: Path
    """Held by it."""


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
    found = []
    for lock in paths.watchers():
        if is_locked(lock):
            host, process = paths.who_watches(lock)
            found.append(Watcher(host, process, lock))
    return found


def watchers_in(folder: Path) -> list[Watcher]:
    """Watchers of the sweep in a folder, or of any sweep in its subfolders."""
    folders = [folder] if SweepPaths(folder).sweep.exists() else sorted(folder.glob("sweep-*"))
    return [watcher for each in folders for watcher in watchers_of(SweepPaths(each))]
