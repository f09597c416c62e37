"""Showing a running worker: its log as it grows, and on a terminal a bar from its metrics."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from eke.common.files import READ_LIMIT, open_to_read
from eke.common.paths import RunPaths
from eke.common.stdout import speak
from eke.common.streams import printable, unfiltered
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
