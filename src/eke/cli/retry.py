"""`eke retry DIR`: sets the records of failed runs aside and starts their sweep's command again."""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eke import app
from eke.cli.standings import run_name
from eke.errors import ConfigError, EkeError, Problem
from eke.files import Refused, read_bytes, read_json
from eke.launch.standing import UNREADABLE, find_standings
from eke.paths import RunPaths, SweepPaths, program, user_path
from eke.peers import speak
from eke.record import EXIT_OK, Outcome, no_runs, read_record
from eke.units import format_number

BAD = (Outcome.oom.name, Outcome.diverged.name, Outcome.crashed.name)
"""Outcomes that are tried again."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `eke retry`."""
    parser.add_argument(
        "--only",
        choices=BAD,
        action="append",
        help="run only this outcome again (default: all three, and records that cannot be read);"
        " the sweep's command, which follows, also runs what has crashed or has not ended",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the command of a sweep.json that another user owns: it can run any program",
    )


def retry(options: argparse.Namespace) -> int:
    """Set the records of failed runs aside and start the sweep's command again."""
    folder = user_path(options.folder).resolve()  # its command may have been started elsewhere
    sweep = SweepPaths(folder)
    if not sweep.sweep.exists():
        if not folder.exists():
            missing = [user_path(options.folder)]
            raise ConfigError(no_runs(missing, "retry", usual="runs/sweep-ID"))
        run, paths = None, RunPaths(folder)
        with contextlib.suppress(OSError):  # the command of another user's run is no advice
            run = read_record(paths) if read_bytes(paths.record, own=True) else None
        why = "is not the folder of a sweep" + ("; a single run has its own command" if run else "")
        fix = shlex.join([*run.command, "rerun=true"]) if run else "eke retry runs/sweep-ID"
        raise ConfigError(Problem("DIR", str(folder), why, fix))
    directory, command, cells = _recorded(sweep.sweep, options.trust)
    wanted = options.only or [*BAD, UNREADABLE]
    found = {run_name(s) or s.label: s.paths for s in find_standings(folder) if s.state in wanted}
    chosen = list(found.values())  # cells that are the same run are one
    refuse_a_copy(folder, directory, cells)
    if not chosen:
        speak(f"nothing to run again: no run is {' or '.join(wanted)}")
        return EXIT_OK
    is_search = command[0] == "fit"
    words = ["eke", *command] if is_search else [*program().split(), *command]
    speak(f"in {shlex.quote(directory)}: {shlex.join(words)}")
    speak(f"running again: {format_number(len(chosen), 'run')}")
    os.chdir(directory)
    with aside(chosen):
        if not is_search:
            return app.main(command)
        from eke.cli import fit  # only here: one sweep in many is a search

        return fit.main(command[1:])


def _recorded(file: Path, trust: bool) -> tuple[str, list[str], list[dict[str, Any]]]:
    """Where a sweep was started, with which command, and its cells; by a file of this user's.

    The command can name programs (slurm.setup, slurm.python), and files that name others.
    """
    try:
        content = read_json(file, own=not trust)
        directory, command, cells = (content[key] for key in ("directory", "command", "cells"))
        texts = [directory, *command, *(cell.get("folder") or "" for cell in cells)]
        if command[0] not in ("-m", "fit") or not all(isinstance(text, str) for text in texts):
            raise ValueError
    except Refused as error:
        if trust:
            raise
        again = shlex.join(["eke", "retry", str(file.parent), "--trust"])
        why = f"{error.strerror}, and the command in it can run any program with your rights"
        fix = f"{again}   (after less {shlex.quote(str(file))})"
        raise ConfigError(Problem("DIR", error.filename, why, fix)) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise EkeError(
            f"{file}: does not hold the sweep's command; start the sweep again"
        ) from error
    return directory, command, cells


def refuse_a_copy(folder: Path, directory: str, cells: Sequence[dict[str, Any]]) -> None:
    """Reject a sweep that was moved or copied: its command runs in the old folder.

    Args:
        folder: of the sweep, as it is named now.
        directory: where its command was started.
        cells: of its file.

    Raises:
        EkeError: it was moved or copied here.
    """
    runs = {Path(directory, cell["folder"]).parent for cell in cells if cell.get("folder")}
    if not runs or any(each.resolve() == folder.parent.resolve() for each in runs):
        return
    raise EkeError(
        f"{folder} has been moved or copied: its command runs in {runs.pop()}. Start it again "
        f"with paths.runs={folder.parent}; finished runs there are reused"
    )


@contextmanager
def aside(runs: Sequence[RunPaths]) -> Iterator[None]:
    """Keep final records under other names, so that their runs count as unfinished in here.

    When none of the runs has been started in here (the command is refused, or stopped while it
    plans), they get their records back.
    """
    before = {paths.folder: _traces(paths) for paths in runs}
    kept: dict[Path, Path] = {}
    try:
        for paths in runs:
            with contextlib.suppress(FileNotFoundError):  # what could not be started has none
                name = _free_name(paths)
                paths.record.rename(name)
                kept[paths.record] = name
        yield
    finally:
        if kept and all(_traces(p) == before[p.folder] and not p.record.exists() for p in runs):
            for record, name in kept.items():
                name.rename(record)
            back = format_number(len(kept), "record")
            sys.stderr.write(f"nothing was started; {back} restored\n")


def _traces(paths: RunPaths) -> list[int]:
    """What changes when a run is started here, or handed in to a cluster."""
    files = [file for file in (paths.attempts, paths.ticket) if file.exists()]
    return [file.stat().st_mtime_ns for file in files]


def _free_name(paths: RunPaths) -> Path:
    """For another record of a run."""
    number = 1
    while (kept := paths.record.with_suffix(f".{number}.json")).exists():
        number += 1
    return kept
