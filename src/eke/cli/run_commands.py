"""`eke status|logs|cancel|retry DIR`: show, follow, cancel and retry runs."""

import argparse
import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from eke import workflows
from eke.cli import make_parser
from eke.common.errors import ConfigError, EkeError, Fix, Problem
from eke.common.files import (
    READ_LIMIT,
    UntrustedPathError,
    is_locked,
    last_bytes,
    read_bytes,
    read_json,
    read_text,
    who_has_open,
)
from eke.common.output import has_reader, printable, raw_stream, write_line
from eke.common.paths import RunPaths, SweepPaths, program, user_path
from eke.common.text import align, format_number, format_seconds
from eke.launch.interface import find_launcher, launchers_of
from eke.launch.processes.follow import Tail, Watcher, watchers_in
from eke.launch.processes.status import (
    INTERRUPTED,
    NO_FOLDER,
    NOT_STARTED,
    QUEUED,
    RUNNING,
    UNREADABLE,
    WAITING,
    RunStatus,
    find_statuses,
    is_active,
    open_rows,
)
from eke.plan.record import EXIT_FAILED, EXIT_OK, Outcome, no_runs, read_attempts, read_record
from eke.results.report.summary import distinct_overrides

_RETRYABLE_OUTCOMES = (Outcome.oom.name, Outcome.diverged.name, Outcome.crashed.name)
"""Outcomes that `eke retry` reruns."""


def retry(options: argparse.Namespace) -> int:
    """Rename the records of failed runs and rerun the sweep's command."""
    folder = user_path(options.folder).resolve()  # before the change to the start folder
    sweep = SweepPaths(folder)
    if not sweep.sweep.exists():
        if not folder.exists():
            raise ConfigError(no_runs([user_path(options.folder)], "retry", usual="runs/sweep-ID"))
        run, paths = None, RunPaths(folder)
        with contextlib.suppress(OSError):  # do not suggest another user's command
            run = read_record(paths) if read_bytes(paths.record, own=True) else None
        why = "is not a sweep folder" + (". Rerun the run with its command" if run else "")
        again = shlex.join([*run.command, "rerun=true"]) if run else "eke retry runs/sweep-ID"
        raise ConfigError(Problem("DIR", str(folder), why, Fix(remark=again), "not_a_sweep"))
    directory, command, cells = _recorded(sweep.sweep, options.trust)
    wanted = options.only or [*_RETRYABLE_OUTCOMES, UNREADABLE]
    found = {_run_name(s) or s.label: s.paths for s in find_statuses(folder) if s.state in wanted}
    chosen = list(found.values())  # several cells may be the same run
    _refuse_a_copy(folder, directory, cells)
    if not chosen:
        write_line(f"no run is {' or '.join(wanted)}")
        return EXIT_OK
    is_search = command[0] == "fit"
    words = ["eke", *command] if is_search else [*program().split(), *command]
    write_line(f"in {shlex.quote(directory)}: {shlex.join(words)}")
    write_line(f"rerunning {format_number(len(chosen), 'run')}")
    os.chdir(directory)
    with _set_records_aside(chosen):
        if not is_search:
            return workflows.main(command)
        from eke.cli import fit  # slow, and few sweeps are searches

        return fit.main(command[1:])


def _recorded(file: Path, trust: bool) -> tuple[str, list[str], list[dict[str, Any]]]:
    """Return a sweep's start folder, command and cells. The command can run any program."""
    try:
        content = read_json(file, own=not trust)
        directory, command, cells = (content[key] for key in ("directory", "command", "cells"))
        texts = [directory, *command, *(cell.get("folder") or "" for cell in cells)]
        if command[0] not in ("-m", "fit") or not all(isinstance(text, str) for text in texts):
            raise ValueError
    except UntrustedPathError as error:
        if trust:
            raise
        again = shlex.join(["eke", "retry", str(file.parent), "--trust"])
        why = f"{error.strerror}. The command in it can run any program with your rights"
        fix = Fix(remark=f"{again}   (after less {shlex.quote(str(file))})")
        raise ConfigError(Problem("DIR", error.filename, why, fix, "untrusted_file")) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise EkeError(f"{file}: has no command of a sweep. Start the sweep again") from error
    return directory, command, cells


def _refuse_a_copy(folder: Path, directory: str, cells: Sequence[dict[str, Any]]) -> None:
    """Raise EkeError for a moved or copied sweep, whose command runs in `directory`."""
    runs = {Path(directory, cell["folder"]).parent for cell in cells if cell.get("folder")}
    if not runs or any(each.resolve() == folder.parent.resolve() for each in runs):
        return
    raise EkeError(
        f"{folder} was moved or copied. Its command runs in {runs.pop()}. Start it again with "
        f"paths.runs={folder.parent} to reuse the finished runs there"
    )


@contextmanager
def _set_records_aside(runs: Sequence[RunPaths]) -> Iterator[None]:
    """Rename final records, so that the runs are unfinished. Restore them if no run starts."""
    before = {paths.folder: _traces(paths) for paths in runs}
    kept: dict[Path, Path] = {}
    try:
        for paths in runs:
            with contextlib.suppress(FileNotFoundError):  # the run did not start
                numbered = (paths.record.with_suffix(f".{n}.json") for n in itertools.count(1))
                name = next(each for each in numbered if not each.exists())
                paths.record.rename(name)
                kept[paths.record] = name
        yield
    finally:
        if kept and all(_traces(p) == before[p.folder] and not p.record.exists() for p in runs):
            for record, name in kept.items():
                name.rename(record)
            back = format_number(len(kept), "record")
            sys.stderr.write(f"no run was started, {back} restored\n")


def _traces(paths: RunPaths) -> list[int]:
    """Return modification times that change when a run is started or submitted."""
    tickets = (paths.ticket(launcher) for launcher in launchers_of(paths))
    files = [file for file in (paths.attempts, *tickets) if file.exists()]
    return [file.stat().st_mtime_ns for file in files]


_HEADER = ("state", "step", "loss", "where", "run", "overrides")

_ASK_S = 10.0
"""Poll interval for ended runs in seconds. Each poll is one scheduler query."""


def main(command: str, arguments: Sequence[str]) -> int:
    """Parse and run a command. Return the exit code."""
    run, about = _COMMANDS[command]
    parser = make_parser(command, about)
    parser.add_argument("folder", metavar="DIR", help="a run, a sweep, or the folder of all runs")
    add = parser.add_argument
    if command == "status":
        how = parser.add_mutually_exclusive_group()
        how.add_argument("--json", action="store_true", help="print JSON")
        how.add_argument("--live", action="store_true", help="update until all end (terminal)")
    elif command == "logs":
        add("-f", "--follow", action="store_true", help="print new lines until all runs end")
        add("-n", "--lines", type=int, default=20, help="lines per log, 0 for all (default: 20)")
    elif command == "retry":
        add(
            "--only", choices=_RETRYABLE_OUTCOMES, action="append",
            help="rerun only this outcome (default: all three, and unreadable records). The "
            "sweep's command also runs crashed and unfinished runs",
        )  # fmt: skip
        add(
            "--trust", action="store_true",
            help="use a sweep.json of another user. Its command can run any program",
        )  # fmt: skip
    return run(parser.parse_args(arguments))


_JSON = ("label", "state", "step", "total", "loss", "where", "note", "silent")


def status(options: argparse.Namespace) -> int:
    """Print the progress of all runs. Return EXIT_FAILED if a launcher did not answer."""
    if options.live and sys.stdout.isatty():
        return watch(user_path(options.folder))
    standings = find_statuses(user_path(options.folder))
    if options.json:
        plain = [
            {"folder": str(s.paths.folder), **{f: getattr(s, f) for f in _JSON}} for s in standings
        ]
        sys.stdout.write(json.dumps(plain, indent=2) + "\n")
    else:
        rounds = open_rows(user_path(options.folder))
        sys.stdout.write(
            "\n".join([_status_table(standings), *([rounds] if rounds else [])]) + "\n"
        )
    return EXIT_FAILED if any(each.silent for each in standings) else EXIT_OK


def _status_table(standings: Sequence[RunStatus]) -> str:
    """Format one line per run, reasons for failing or waiting, and the number in each state."""
    rows = [
        (s.state, *s.newest.texts(s.total)[:2], s.where, _run_name(s), words)
        for s, words in zip(standings, _distinguishing_overrides(standings), strict=True)
    ]
    lines = align([_HEADER, *rows])
    for each in standings:
        if each.note:
            lines += ["", *align([[f"{each.state}: {_run_name(each) or each.label}"]])]
            lines += align([[f"  {each.note}"]])
    return "\n".join(
        [*lines, "", _counts_by_state(standings) + _unreachable_launcher_message(standings)]
    )


LOOK_S, POLL_CLUSTER_S = 1.0, 15.0
"""Poll intervals of the files, and of a cluster's scheduler, in seconds."""

_SLOW_FACTOR = 10.0
"""Minimum ratio of a pause to the duration of the poll before it, for slow disks."""

_STYLES = {
    RUNNING: "cyan", Outcome.ok.name: "green", Outcome.refused.name: "dim", QUEUED: "",
    Outcome.skipped.name: "dim", NOT_STARTED: "dim", WAITING: "",
}  # fmt: skip
"""State -> style. States without a style are failures."""


def watch(folder: Path) -> int:
    """Show the progress of all runs until they end. Ctrl-C only stops the display."""
    console = Console(file=raw_stream(sys.stdout), highlight=False, markup=False, emoji=False)
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            standings = find_statuses(folder)
            live.update(render_runs(standings, shutil.get_terminal_size().lines), refresh=True)
            pause = POLL_CLUSTER_S if any(each.job for each in standings) else LOOK_S
            if not (is_active(folder, standings) and has_reader()):
                break
            time.sleep(max(pause, _SLOW_FACTOR * (time.monotonic() - began)))
    return EXIT_OK


def render_runs(standings: Sequence[RunStatus], height: int = 24) -> RenderableType:
    """Render a progress bar, active runs, then as many others as fit."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("state", "", "step", "loss", "a step", "left"):
        table.add_column(title, no_wrap=True)
    table.add_column("overrides")  # the only column that shrinks in a narrow terminal
    worded = zip(standings, _distinguishing_overrides(standings), strict=True)
    ordered = sorted(worded, key=lambda pair: _importance(pair[0]))
    room = max(3, height - 6)
    for each, words in ordered[:room]:
        bar = ProgressBar(total=max(each.total, 1), completed=each.step, width=10)
        cells = map(Text, each.newest.texts(each.total))
        label = Text(printable(words), no_wrap=True, overflow="ellipsis")
        style = _STYLES.get(each.state, "red")
        table.add_row(each.state, bar if each.total else "", *cells, label, style=style)
    parts: list[RenderableType] = [_whole(standings), Text(summary_line(standings)), Text(), table]
    if len(ordered) > room:
        parts.append(Text(f"... and {len(ordered) - room} more", style="dim"))
    return Group(*parts)


def summary_line(standings: Sequence[RunStatus]) -> str:
    """Format the number of runs in each state and the remaining time of active runs."""
    running = (each for each in standings if each.state == RUNNING)
    left = [s for each in running if (s := each.newest.left_s(each.total)) is not None]
    longest = f" ({format_seconds(max(left))} left)" if left else ""
    return _counts_by_state(standings) + longest + _unreachable_launcher_message(standings)


def _whole(standings: Sequence[RunStatus]) -> RenderableType:
    """Render a progress bar of finished runs and the finished parts of active runs."""
    over = sum(not each.is_active and each.state != NOT_STARTED for each in standings)
    parts = sum(each.step / each.total for each in standings if each.is_active and each.total)
    line = Table.grid()  # a separate bar prints no newline
    line.add_row(ProgressBar(total=len(standings), completed=over + parts, width=60))
    return line


def _importance(each: RunStatus) -> tuple[int, bool]:
    """Return a sort key: running, failed, finished, waiting."""
    if each.state not in _STYLES:
        return 1, False
    rank = {RUNNING: 0, Outcome.ok.name: 2}.get(each.state, 3)
    return rank, rank == 3 and not each.is_active


def _distinguishing_overrides(standings: Sequence[RunStatus]) -> list[str]:
    """Return the overrides of each run without those common to all."""
    return [
        " ".join(own) for own in distinct_overrides([tuple(s.label.split()) for s in standings])
    ]


def _run_name(each: RunStatus) -> str:
    """Return the name of a run's folder, "" for a configuration without run."""
    has_none = each.state == Outcome.refused.name or each.paths.folder.name == NO_FOLDER
    return "" if has_none else each.paths.folder.name


def _counts_by_state(standings: Sequence[RunStatus]) -> str:
    """Format the total number of runs and the number in each state: `3 runs: 2 ok, 1 running`."""
    counts = Counter(each.state for each in standings)
    total = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    return f"{format_number(len(standings), 'run')}: {total}"


def _unreachable_launcher_message(standings: Sequence[RunStatus]) -> str:
    """Return a message about launchers that do not answer, "" if all do."""
    silent = {each.paths.folder: each for each in standings if each.silent}
    if not silent:
        return ""
    first = next(iter(silent.values()))
    return (
        f"\n{first.launcher} does not answer: {first.silent}\n"
        f"unknown: the jobs of {format_number(len(silent), 'run')}. All else is read from files"
    )


def logs(options: argparse.Namespace) -> int:
    """Print the last log lines of one run, or of the running and failed runs."""
    folder = user_path(options.folder)
    standings = find_statuses(folder)
    several = len(standings) > 1
    shown = (
        [s for s in standings if s.state in (*_RETRYABLE_OUTCOMES, RUNNING)]
        if several
        else standings
    )
    if not shown:
        sys.stdout.write("no run is running or has failed\n")
    # Output from now on is new, also of runs that start later.
    tails = {each.paths.folder: Tail(each.paths.log) for each in standings}
    for each in shown:
        _heading(each, len(shown))
        if lines := _last_lines(_log_of(each.paths), options.lines):
            write_line("\n".join(lines))
    if options.follow:
        _follow_logs(folder, standings, shown, tails)
    return EXIT_OK


def _follow_logs(
    folder: Path, standings: list[RunStatus], shown: Sequence[RunStatus], tails: dict[Path, Tail]
) -> None:
    """Print new log output of `shown` and starting runs until all end. `tails` are positions."""
    followed = {each.paths.folder: each for each in shown}
    known = {each.paths.folder: each.state for each in standings}
    going_on, asked = is_active(folder, standings), time.monotonic()
    while going_on and has_reader():
        time.sleep(0.5)
        if time.monotonic() - asked >= _ASK_S:
            standings = find_statuses(folder)
            going_on, asked = is_active(folder, standings), time.monotonic()
            begun = [s for s in standings if s.state != known.get(s.paths.folder)]
            followed |= {each.paths.folder: each for each in begun}
        for run, each in followed.items():
            if run not in tails:
                tails[run] = Tail(each.paths.log)
                tails[run].position = 0
            if lines := tails[run].lines(last=not going_on):
                _heading(each, len(followed))
                write_line("\n".join(lines))


def _log_of(paths: RunPaths) -> Path:
    """Return the log of a run, or the log of its job if the run has none."""
    if paths.log.exists():
        return paths.log
    logs = (find_launcher(launcher).log_of(paths) for launcher in launchers_of(paths))
    return next((log for log in logs if log.exists()), paths.log)


def _heading(each: RunStatus, count: int) -> None:
    if count > 1:
        write_line(f"==> {_log_of(each.paths)} ({each.state})")


def _last_lines(log: Path, count: int) -> list[str]:
    try:
        found = last_bytes(log, READ_LIMIT if count else 1 << 30)
    except OSError:
        return ["(no log yet)"]
    lines = found.decode(errors="replace").splitlines()
    return lines[-count:] if count else lines


def _cancel(options: argparse.Namespace) -> int:
    """Ask queued and running runs to save and end, and keep waiting runs from starting."""
    folder = user_path(options.folder)
    # Several runs of a sweep may share a folder.
    found = {s.paths.folder: s for s in find_statuses(folder)}
    active = [s for s in found.values() if s.is_active]
    begun = [s for s in active if s.state != WAITING]
    waiting = len(active) - len(begun)
    # One process supervises all runs of a local sweep. A second signal would kill them.
    watchers = {s.paths.folder: _watcher(s.paths) for s in begun if not s.job}
    locks = [*watchers.values()]
    if waiting or locks or not active:  # other runs may be waiting to continue these
        locks += watchers_in(folder)
    answers = _interrupt(locks)
    refused = [text for text in dict.fromkeys(answers.values()) if text]
    asked = {run for run, watcher in watchers.items() if not answers[watcher]}
    # Cancel jobs last: a supervisor would submit other jobs in their place.
    for launcher in dict.fromkeys(s.launcher for s in begun if s.job):
        jobs = {s.paths.folder: s.job for s in begun if s.job and s.launcher == launcher}
        try:
            find_launcher(launcher).cancel(list(jobs.values()))
            asked |= jobs.keys()
        except EkeError as error:
            refused.append(f"{format_number(len(jobs), 'run')} may still be running: {error}")
    if unseen := [s.silent for run, s in found.items() if s.silent and run not in asked]:
        runs = format_number(len(unseen), "run")
        refused.append(f"not stopped: {runs} with a job that may wait or run: {unseen[0]}")
    said = [f"asked {format_number(len(asked), 'run')} to save and end"] if begun else []
    said += [f"{format_number(waiting, 'run')} will not start"] if waiting and not refused else []
    said += ["asked the sweep to end"] if locks and not active and not refused else []
    if not active and not locks and not unseen:
        # Their job names left the queue, and their job numbers may belong to other jobs.
        gone = [s for s in found.values() if s.launcher and s.state in (NOT_STARTED, INTERRUPTED)]
        lost = f", the jobs of {format_number(len(gone), 'run')} are gone" if gone else ""
        said = [f"no run is queued or running{lost}"]
    write_line("\n".join(line for line in (", ".join(said), *refused) if line))
    return EXIT_FAILED if refused else EXIT_OK


def _watcher(paths: RunPaths) -> Watcher:
    attempts = read_attempts(paths)
    host = attempts[-1].get("host") if attempts else None
    try:
        process = read_text(paths.lock).split()[-1]
    except (OSError, IndexError):
        process = "unknown"
    return Watcher(host or socket.gethostname(), process, paths.lock)


def _interrupt(watchers: Sequence[Watcher]) -> dict[Watcher, str]:
    """Send Ctrl-C to processes of this machine, each once. Return the reason if impossible."""
    # Find all processes before the first signal, after which locks may be released.
    found = {watcher: _find_process(*watcher) for watcher in watchers}
    for number in sorted({each for each in found.values() if isinstance(each, int)}):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(number, signal.SIGINT)
    return {w: each if isinstance(each, str) else "" for w, each in found.items()}


def _find_process(host: str, process: str, lock: Path) -> int | str:
    """Return the process id of the holder of a lock on this machine, or why there is none."""
    if host != socket.gethostname():
        return f"process {process} runs on {host}. Cancel it there"
    try:
        found = who_has_open(lock)
    except OSError as error:
        return f"process {process} cannot be found: {error}"
    for number, own_number in found.items():  # ids in a container differ
        if process in (str(number), own_number):
            return number
    if found or not is_locked(lock):
        return f"process {process} has ended, and its worker will end"
    again = shlex.join(["eke", "cancel", str(lock.parent)])
    return (
        f"process {process} holds {lock}, but is not visible here. It belongs to another user "
        f"or PID namespace (container). Cancel it there: {again}"
    )


_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str]] = {
    "status": (status, "Shows the progress of runs on this machine and in a cluster."),
    "logs": (logs, "Shows the last log lines of running and failed runs, or of a single run."),
    "cancel": (_cancel, "Stops runs after saving. Repeat their command to resume them."),
    "retry": (retry, "Reruns crashed, diverged and out-of-memory runs. Old records are kept."),
}  # fmt: skip
