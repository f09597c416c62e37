"""Run folders: reuse a final record, resume an attempt, or take a new folder."""

import itertools
import os
import shlex
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from eke.common.errors import BusyError, ConfigError, EkeError, Fix, Problem
from eke.common.files import (
    UntrustedPathError,
    is_locked,
    make_private_dir,
    open_file,
    read_text,
    try_lock,
)
from eke.common.paths import RunPaths, user_path
from eke.plan.identity import changed_fingerprint
from eke.plan.planner import Plan
from eke.plan.record import USUAL_NAME, NoRecord, Outcome, Record, UnreadableRecord, read_record


class RunFolder(NamedTuple):
    """A run's folder and its known state."""

    paths: RunPaths
    record: Record | None = None
    """Final record that answers the request. None if the run has to be started."""
    note: str = ""
    """Reason for this folder, for display. Empty for a new run."""
    outdated: tuple[str, ...] = ()
    """Reasons why an earlier run, in a folder next to this one, is not reused."""


def folder_names(run_id: str) -> Iterator[str]:
    """Yield the names of a run's folders: `<run_id>`, `<run_id>-2`, ..."""
    return (f"{run_id}-{n}" if n > 1 else run_id for n in itertools.count(1))


def find_place(
    plan: Plan,
    old: Container[str] | None = None,
    changes_since: Callable[[RunPaths, Record, Plan], list[str]] = (
        lambda _, record, plan: changed_fingerprint(record.machine, plan.machine)
    ),
) -> RunFolder:
    """Return the folder for a plan. Final records and unknown files are never overwritten.

    Unfinished runs are resumed. A final record, also in a renamed folder, is reused if the machine
    has not changed since. Otherwise, or with `rerun`, the run goes to a new folder, as it does if
    the record is invalid or another run's. `old`: folders that existed before `rerun` was
    requested, None for all. Raises EkeError if a record cannot be read or is of a newer version.
    """
    runs, rerun = user_path(plan.config.paths.runs), plan.config.rerun
    passed, outdated = "", tuple[str, ...]()
    named = plan.config.train.resume
    for name in [named] if named else folder_names(plan.run_id):
        paths = RunPaths(runs / name)
        if not paths.folder.exists():
            break
        try:
            record = read_record(paths)
        except UnreadableRecord as error:
            if isinstance(error, NoRecord) and not named:
                outdated = (str(error),)
                passed = f"next to {name}: {error}"
                continue
            fix = "Nothing was changed. Another folder: paths.runs=FOLDER"
            raise EkeError(f"{error}\n{fix}") from error
        # An unfinished run keeps its folder even with `rerun`: it has no result to preserve.
        if record is None or not Outcome[record.outcome].is_final:
            note = f"resuming {paths.folder}" if paths.attempts.exists() else passed
            return RunFolder(paths, None, note)
        changes = changes_since(paths, record, plan)
        again = rerun and (old is None or paths.folder.name in old)
        if named or (not changes and not again):
            return _answer(paths, record, plan)
        outdated = () if rerun else tuple(changes)
        why = "rerun=true" if again else "; ".join(changes)
        passed = f"next to {paths.folder.name}: {why}"
    for kept, record in () if rerun else _renamed(runs, plan.run_id):
        if not changes_since(kept, record, plan):
            return _answer(kept, record, plan)
    return RunFolder(paths, None, passed, outdated)


def _answer(paths: RunPaths, record: Record, plan: Plan) -> RunFolder:
    note = f"answered from {paths.record}. To repeat it: rerun=true"
    return RunFolder(paths, record, note + tracker_change_note(record, plan, str(paths.folder)))


def _renamed(runs: Path, run_id: str) -> list[tuple[RunPaths, Record]]:
    """Return the finished runs of an identity in folders with another name."""
    try:
        changed = runs.stat().st_mtime_ns  # changes when a folder in it is renamed
    except OSError:
        return []
    return [
        (paths, record) for paths, record in _moved_runs(runs, changed) if record.run_id == run_id
    ]


@lru_cache(maxsize=1)
def _moved_runs(runs: Path, _: int) -> list[tuple[RunPaths, Record]]:
    """Return the finished runs in folders that eke would name otherwise."""
    found = []
    with os.scandir(runs) as entries:
        odd = sorted(entry.name for entry in entries if not USUAL_NAME.fullmatch(entry.name))
    for paths in (RunPaths(runs / name) for name in odd):
        with suppress(UnreadableRecord, OSError):  # it may belong to another process
            record = read_record(paths)
            if record is not None and Outcome[record.outcome].is_final:
                found.append((paths, record))
    return found


def tracker_change_note(record: Record, plan: Plan, folder: str = "RUN") -> str:
    """Return a note if a finished run used another tracker than requested, else ""."""
    asked, had = plan.config.tracker.option, record.choices.get("tracker")
    if had is None or asked in ("none", had):
        return ""
    if asked == "wandb":
        return f" (it ran with tracker={had}, to upload: {shlex.join(['eke', 'sync', folder])})"
    return f" (it ran with tracker={had}, for {asked}: rerun=true)"


@contextmanager
def lock_run_folder(paths: RunPaths) -> Iterator[int]:
    """Create and lock the run folder. Raise BusyError if it is locked, ConfigError if unusable.

    Yields the lock's descriptor, which the worker inherits to keep the folder locked.
    """
    try:
        make_private_dir(paths.folder)
        descriptor = open_file(paths.lock, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if is_locked(paths.lock):  # by another user, whose file is read-only here
            raise _busy_error(paths) from error
        # A rule checked the folder when the run was planned.
        why = f"{error.filename or paths.folder} cannot be written: {error.strerror or error}"
        is_refused = isinstance(error, UntrustedPathError)
        fix = Fix(f"paths.runs=FOLDER_{'OF_YOURS' if is_refused else 'ON_ANOTHER_DISK'}")
        runs = str(paths.folder.parent)
        problem = Problem("paths.runs", runs, why, fix, passing=not is_refused, id="not_writable")
        raise ConfigError(problem) from error
    try:
        # `eke sync` holds the lock for microseconds.
        if not lock_within(descriptor, paths.folder.parent, patience_s=0.06, pause_s=0.02):
            raise _busy_error(paths)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _busy_error(paths: RunPaths) -> BusyError:
    owner = ""
    with suppress(OSError):
        owner = read_text(paths.lock, 1 << 10).strip()  # a word and a number
    return BusyError(f"run {paths.folder.name} is in use by {owner or 'another process'}")


def lock_within(
    descriptor: int,
    runs: Path,
    patience_s: float,
    pause_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Try to lock a file for some seconds. Raise ConfigError on a file system without locks."""
    try:
        while not (is_ours := try_lock(descriptor)) and patience_s > 0:
            sleep(pause_s)
            patience_s -= pause_s
        return is_ours
    except OSError as error:
        why = f"its file system has no locks ({error.strerror})"
        why += ". Lustre has them if mounted with flock"
        fix = Fix("paths.runs=FOLDER", remark="on another file system")
        raise ConfigError(Problem("paths.runs", str(runs), why, fix, "no_locks")) from error
