"""`eke status --live DIR`: show the progress of a running sweep, read from its files."""

import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from eke.common.streams import is_heard, printable, unfiltered
from eke.common.text import format_number, format_seconds
from eke.launch.processes.status import (
    ACTIVE,
    NO_FOLDER,
    NOT_STARTED,
    QUEUED,
    RUNNING,
    WAITING,
    RunStatus,
    find_standings,
    goes_on,
)
from eke.plan.record import EXIT_OK, Outcome

LOOK_S = 1.0
"""Poll interval of the files."""

ASK_S = 15.0
"""Poll interval if each poll queries a cluster's scheduler, which serves other users too."""

PLAIN_S = 30.0
"""Interval between two lines without a terminal."""

SLOW_FACTOR = 10.0
"""Minimum ratio of a pause to the preceding poll's duration, so that slow disks are read rarely."""

STYLES = {
    RUNNING: "cyan", Outcome.ok.name: "green", Outcome.refused.name: "dim", QUEUED: "",
    Outcome.skipped.name: "dim", NOT_STARTED: "dim", WAITING: "",
}  # fmt: skip
"""States without a style are failures."""


def watch(
    folder: Path,
    look: Callable[[Path], list[RunStatus]] = find_standings,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show the progress of every run until all have ended; Ctrl-C stops only the display."""
    try:
        with _display() as show:
            while True:
                began = time.monotonic()
                standings = look(folder)
                pause = show(standings)
                if not (goes_on(folder, standings) and is_heard()):
                    return EXIT_OK
                sleep(max(pause, SLOW_FACTOR * (time.monotonic() - began)))
    except KeyboardInterrupt:
        return EXIT_OK


@contextmanager
def _display() -> Iterator[Callable[[Sequence[RunStatus]], float]]:
    """A function that shows the standings and returns the seconds until it is called again."""
    if not sys.stdout.isatty():
        yield partial(_print_changes, {})
        return
    console = Console(file=unfiltered(sys.stdout), highlight=False, markup=False, emoji=False)
    with Live(console=console, auto_refresh=False, transient=False) as live:

        def show(standings: Sequence[RunStatus]) -> float:
            live.update(render_runs(standings, shutil.get_terminal_size().lines), refresh=True)
            return ASK_S if any(each.job for each in standings) else LOOK_S

        yield show


def _print_changes(known: dict[Path, str], standings: Sequence[RunStatus]) -> float:
    """Print a line, and one for each run that has ended since the last call."""
    for each in standings:
        if known.get(each.paths.folder) in ACTIVE and not each.is_active:
            sys.stdout.write(f"{each.state}: {each.label}\n")
        known[each.paths.folder] = each.state
    sys.stdout.write(f"{summary_line(standings)}\n")
    sys.stdout.flush()
    return PLAIN_S


def render_runs(standings: Sequence[RunStatus], height: int = 24) -> RenderableType:
    """Overall progress bar, active runs, then as many others as fit."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("state", "", "step", "loss", "a step", "left"):
        table.add_column(title, no_wrap=True)
    table.add_column("overrides")  # the only column that shrinks in a narrow terminal
    worded = zip(standings, own_words(standings), strict=True)
    ordered = sorted(worded, key=lambda pair: _importance(pair[0]))
    room = max(3, height - 6)
    for each, words in ordered[:room]:
        table.add_row(*_cells(each, words), style=STYLES.get(each.state, "red"))
    parts: list[RenderableType] = [_whole(standings), Text(summary_line(standings)), Text(), table]
    if len(ordered) > room:
        parts.append(Text(f"... and {len(ordered) - room} more", style="dim"))
    return Group(*parts)


def summary_line(standings: Sequence[RunStatus]) -> str:
    """Number of runs in each state, and the remaining time of active runs."""
    left = [each.left_s for each in standings if each.state == RUNNING and each.left_s is not None]
    longest = f"; what runs has {format_seconds(max(left))} left" if left else ""
    return counts_by_state(standings) + longest + silence(standings)


def _whole(standings: Sequence[RunStatus]) -> RenderableType:
    """Progress bar of finished runs and the finished parts of active ones."""
    over = sum(not each.is_active and each.state != NOT_STARTED for each in standings)
    parts = sum(each.step / each.total for each in standings if each.is_active and each.total)
    line = Table.grid()  # a bar by itself prints no newline
    line.add_row(ProgressBar(total=len(standings), completed=over + parts, width=60))
    return line


def _importance(each: RunStatus) -> tuple[int, bool]:
    """Sort key: running, failed, finished, waiting."""
    if each.state == RUNNING:
        return 0, False
    if each.state not in STYLES:
        return 1, False
    return (2, False) if each.state == Outcome.ok.name else (3, not each.is_active)


def _cells(each: RunStatus, words: str) -> tuple[RenderableType, ...]:
    bar = ProgressBar(total=max(each.total, 1), completed=each.step, width=10)
    return (
        Text(each.state),
        bar if each.total else Text(),
        Text(f"{each.step}/{each.total}" if each.total else ""),
        Text("" if each.loss is None else f"{each.loss:.4f}"),
        Text("" if each.step_s is None else format_seconds(each.step_s)),
        Text("" if each.left_s is None else format_seconds(each.left_s)),
        Text(printable(words), no_wrap=True, overflow="ellipsis"),
    )


def own_words(standings: Sequence[RunStatus]) -> list[str]:
    """Overrides of each run, without those common to all."""
    typed = [each.label.split() for each in standings]
    shared = set.intersection(*map(set, typed)) if len(typed) > 1 else set()
    return [" ".join(word for word in words if word not in shared) for words in typed]


def run_name(each: RunStatus) -> str:
    """Name of its folder; empty for a cell that has no run, or none yet."""
    has_none = each.state == Outcome.refused.name or each.paths.folder.name == NO_FOLDER
    return "" if has_none else each.paths.folder.name


def counts_by_state(standings: Sequence[RunStatus]) -> str:
    """Number of runs, in total and in each state: `3 runs: 2 ok, 1 running`."""
    counts = Counter(each.state for each in standings)
    total = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    return f"{format_number(len(standings), 'run')}: {total}"


def silence(standings: Sequence[RunStatus]) -> str:
    """Message about launchers that do not answer; empty if all do."""
    silent = {each.paths.folder: each for each in standings if each.silent}
    if not silent:
        return ""
    first = next(iter(silent.values()))
    return (
        f"\n{first.launcher} does not answer: {first.silent}\n"
        f"not seen: what it does with the jobs of {format_number(len(silent), 'run')}; all else is"
        " what the runs' own files say"
    )
