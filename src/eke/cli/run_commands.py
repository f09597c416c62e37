"""`eke status|logs|cancel|retry DIR`: show, follow, cancel and retry runs."""

import argparse
import contextlib
import itertools
import json
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from eke.common.output import has_reader, write_line
from eke.common.paths import RunPaths, SweepPaths, program, short_path
from eke.common.screen import is_quiet, is_verbose, paint, width, wrap, wrap_log
from eke.common.text import format_number
from eke.launch.interface import find_launcher, launchers_of
from eke.launch.processes.follow import Tail, Watcher, open_live, watchers_in
from eke.launch.processes.runs_table import (
    INTERRUPTED,
    NOT_STARTED,
    RUNNING,
    WAITING,
    RunStatus,
    describe_states,
    progress_lines,
    render_runs,
)
from eke.launch.processes.status import UNREADABLE, find_statuses, is_active, open_rows
from eke.launch.processes.sweep import RETRYABLE
from eke.plan.record import EXIT_FAILED, EXIT_OK, no_runs, read_attempts, read_record
from eke.plan.record.find_folder import find_folder
from eke.results.report.summary import label_cells, shared_overrides
from eke.results.report.sweep_result import Failed, failure_lines


def retry(options: argparse.Namespace) -> int:
    """Rename the records of failed runs and rerun the sweep's command."""
    folder = find_folder(options.folder).resolve()  # before the change to the start folder
    sweep = SweepPaths(folder)
    if not sweep.sweep.exists():
        if not folder.exists():
            raise ConfigError(no_runs([Path(options.folder)], "retry", usual="runs/sweep-ID"))
        run, paths = None, RunPaths(folder)
        with contextlib.suppress(OSError):  # do not suggest another user's command
            run = read_record(paths) if read_bytes(paths.record, own=True) else None
        why = "is not a sweep folder" + (". Rerun the run with its command" if run else "")
        again = shlex.join([*run.command, "rerun=true"]) if run else "eke retry runs/sweep-ID"
        raise ConfigError(Problem("DIR", str(folder), why, Fix(remark=again), "not_a_sweep"))
    directory, command, cells = _read_command(sweep.sweep, options.trust)
    wanted = options.only or [*RETRYABLE, UNREADABLE]
    found = {s.name or s.label: s.paths for s in find_statuses(folder) if s.state in wanted}
    chosen = list(found.values())  # several cells may be the same run
    _reject_copy(folder, directory, cells)
    if not chosen:
        write_line('{"rerun": []}' if options.json else f"no run is {' or '.join(wanted)}")
        return EXIT_OK
    is_search = command[0] == "fit"
    words = ["eke", *command] if is_search else [*program().split(), *command]
    if not is_quiet() or options.trust:
        write_line(f"in {shlex.quote(directory)}: {shlex.join(words)}", sys.stderr)
        write_line(f"rerunning {format_number(len(chosen), 'run')}", sys.stderr)
    os.chdir(directory)
    with _set_records_aside(chosen):
        if not is_search:
            return workflows.main([*command, *["--json"] * options.json])
        from eke.cli import fit  # slow, and few sweeps are searches

        return fit.main([*command[1:], *["--json"] * options.json])


def _read_command(file: Path, trust: bool) -> tuple[str, list[str], list[dict[str, Any]]]:
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
        fix = Fix(remark=f"{again}   (first read the command: less {shlex.quote(str(file))})")
        raise ConfigError(Problem("DIR", error.filename, why, fix, "untrusted_file")) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise EkeError(f"{file}: has no command of a sweep. Start the sweep again") from error
    return directory, command, cells


def _reject_copy(folder: Path, directory: str, cells: Sequence[dict[str, Any]]) -> None:
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
    return [file.stat().st_mtime_ns for file in (paths.attempts, *tickets) if file.exists()]


_ASK_S = 10.0
"""Poll interval for ended runs in seconds. Each poll is one scheduler query."""


def main(command: str, arguments: Sequence[str]) -> int:
    """Parse and run a command. Return the exit code."""
    run, about = _COMMANDS[command]
    parser = make_parser(command, about)
    about = "a run, a sweep, or the folder of all runs. The beginning of a name is enough"
    parser.add_argument("folder", metavar="DIR", help=about)
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON")
    if command == "status":
        add("--live", action="store_true", help="update until all end (terminal)")
        add("--all", action="store_true", help="show all rows (default: ten of ended runs)")
    elif command == "logs":
        add("-f", "--follow", action="store_true", help="print new lines until all runs end")
        add("-n", "--lines", type=int, default=20, help="lines per log, 0 for all (default: 20)")
    elif command == "retry":
        add(
            "--only", choices=RETRYABLE, action="append",
            help="rerun only this outcome (default: all three, and unreadable records). The "
            "sweep's command also runs crashed and unfinished runs",
        )  # fmt: skip
        add(
            "--trust", action="store_true",
            help="use a sweep.json of another user. Its command can run any program",
        )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.json and (getattr(options, "live", False) or getattr(options, "follow", False)):
        parser.error("--json prints the present state: without --live and --follow")
    return run(options)


_JSON = ("label", "state", "step", "total", "loss", "where", "note", "silent", "step_s")


def status(options: argparse.Namespace) -> int:
    """Print the progress of all runs. Return EXIT_FAILED if a launcher did not answer."""
    folder = find_folder(options.folder)
    if options.live and sys.stdout.isatty():
        return watch(folder)
    standings = find_statuses(folder)
    if options.json:
        plain = [
            {"folder": str(s.paths.folder), **{f: getattr(s, f) for f in _JSON}} for s in standings
        ]
        write_line(json.dumps(plain, indent=2))
    else:
        lines = _heading_lines(folder, standings)
        lines += [] if is_quiet() else _table_lines(folder, standings, options.all)
        write_line("\n".join(lines[:1] if is_quiet() else lines))
    return EXIT_FAILED if any(each.silent for each in standings) else EXIT_OK


def _heading_lines(folder: Path, standings: Sequence[RunStatus]) -> list[str]:
    """Return the numbers of runs in each state, and the overrides of all runs."""
    shared = " ".join(shared_overrides([each.overrides for each in standings]))
    lines = [f"{paint(short_path(folder), 'bold')}: {describe_states(standings)}"]
    return lines + (wrap(shared, width(), "shared: ") if shared else [])


def _table_lines(folder: Path, standings: Sequence[RunStatus], every: bool) -> list[str]:
    """Return the table, reasons of failures and waiting, and the next commands."""
    lines = render_runs(standings, fold=not every and not is_verbose())
    is_folded = lines[-1:] != [] and lines[-1].startswith("  ...")
    names = label_cells([s.overrides for s in standings], [s.row for s in standings])
    noted = [pair for pair in zip(names, standings, strict=True) if pair[1].note]
    failed = [Failed(name or each.name, each.state, each.note) for name, each in noted]
    lines += ["", *failure_lines(failed), ""] if failed else []
    told = f"{open_rows(folder)}\n{_unreachable_launcher_message(standings)}".strip().splitlines()
    lines += [line for text in told if text for line in wrap(text, width())]
    hints = ["--live to follow"] if is_active(folder, standings) else []
    hints += [f"`eke logs {shlex.quote(short_path(folder))}` for output"]
    hints += [f"--all for all {len(standings)} rows"] if is_folded else []
    return [*lines, *(paint(line, "dim") for line in wrap(", ".join(hints), width()))]


LOOK_S, POLL_CLUSTER_S = 1.0, 15.0
"""Poll intervals of the files, and of a cluster's scheduler, in seconds."""

_SLOW_FACTOR = 10.0
"""Minimum ratio of a pause to the duration of the poll before it, for slow disks."""


def watch(folder: Path) -> int:
    """Show the progress of all runs until they end. Ctrl-C only stops the display."""
    lines = list[str]()
    with contextlib.suppress(KeyboardInterrupt), open_live(sys.stdout) as live:
        while True:
            began = time.monotonic()
            standings = find_statuses(folder)
            lines = [*_heading_lines(folder, standings), *progress_lines(standings), ""]
            lines += render_runs(standings, max(3, live.height - len(lines) - 4) if live else 0)
            lines += wrap_log(_unreachable_launcher_message(standings).splitlines(), width())
            if live:
                live.draw("\n".join(lines))
            pause = POLL_CLUSTER_S if any(each.job for each in standings) else LOOK_S
            if not (is_active(folder, standings) and has_reader()):
                break
            time.sleep(max(pause, _SLOW_FACTOR * (time.monotonic() - began)))
    write_line("\n".join(lines))
    return EXIT_OK


def _unreachable_launcher_message(standings: Sequence[RunStatus]) -> str:
    """Return a message about launchers that do not answer, "" if all do."""
    silent = {each.paths.folder: each for each in standings if each.silent}
    if not silent:
        return ""
    first = next(iter(silent.values()))
    return (
        f"{first.launcher} does not answer: {first.silent}\n"
        f"unknown: the jobs of {format_number(len(silent), 'run')}. All else is read from files"
    )


def logs(options: argparse.Namespace) -> int:
    """Print the last log lines of one run, or of the running and failed runs."""
    folder = find_folder(options.folder)
    standings = find_statuses(folder)
    several = len(standings) > 1
    shown = [s for s in standings if s.state in (*RETRYABLE, RUNNING)] if several else standings
    if options.json:
        found = [
            {"folder": str(s.paths.folder), "state": s.state, "log": str(_log_of(s.paths)),
             "lines": _last_lines(_log_of(s.paths), options.lines)} for s in shown
        ]  # fmt: skip
        write_line(json.dumps(found, indent=2))
        return EXIT_OK
    if not shown:
        write_line("no run is running or has failed")
    # Output from now on is new, also of runs that start later.
    tails = {each.paths.folder: Tail(each.paths.log) for each in standings}
    for each in shown:
        _heading(each, len(shown))
        _write_log(_last_lines(_log_of(each.paths), options.lines))
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
                _write_log(lines)


def _write_log(lines: Sequence[str]) -> None:
    """Print the lines of a log, unchanged except on a terminal."""
    if lines:
        write_line("\n".join(wrap_log(lines, width()) if sys.stdout.isatty() else lines))


def _log_of(paths: RunPaths) -> Path:
    """Return the log of a run, or the log of its job if the run has none."""
    if paths.log.exists():
        return paths.log
    logs = (find_launcher(launcher).log_of(paths) for launcher in launchers_of(paths))
    return next((log for log in logs if log.exists()), paths.log)


def _heading(each: RunStatus, count: int) -> None:
    if count > 1:
        write_line(f"==> {short_path(_log_of(each.paths))} ({each.state})")


def _last_lines(log: Path, count: int) -> list[str]:
    try:
        found = last_bytes(log, READ_LIMIT if count else 1 << 30)
    except OSError:
        return ["(no log yet)"]
    lines = found.decode(errors="replace").splitlines()
    return lines[-count:] if count else lines


def _cancel(options: argparse.Namespace) -> int:
    """Ask queued and running runs to save and end, and keep waiting runs from starting."""
    folder = find_folder(options.folder)
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
    result = {"asked": [*map(str, sorted(asked))], "waiting": waiting, "not_stopped": refused}
    text = "\n".join(line for line in (", ".join(said), *refused) if line)
    write_line(json.dumps(result, indent=2) if options.json else text)
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
