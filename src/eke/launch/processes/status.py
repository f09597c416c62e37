"""Status of runs, from their folders and launchers."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError, EkeError
from eke.common.files import is_locked, read_json, read_text
from eke.common.paths import RunPaths, SweepPaths
from eke.launch.interface import JobStatus, job_statuses
from eke.launch.processes import runs_table
from eke.launch.processes.follow import newest_step, watchers_in, watchers_of
from eke.launch.processes.runs_table import NO_FOLDER, RunStatus
from eke.plan.record import (
    RECORD_LIMIT,
    NoRecord,
    Outcome,
    UnreadableRecord,
    missing_run,
    no_runs,
    read_attempts,
    read_record,
)

_UNKNOWN = "unknown"
"""State of a run whose job may wait or run while its launcher does not answer."""

UNREADABLE = "unreadable"
"""State of a run with an unreadable record. Sweeps skip such a run."""


def find_statuses(folder: Path) -> list[RunStatus]:
    """Return the states of the runs in a folder. Raise ConfigError if none."""
    if folder.name in ("", "..") or folder.is_symlink():
        folder = folder.resolve()  # its siblings may be runs of the sweep
    if not (found := list(_runs_of(folder))):
        raise ConfigError(no_runs([folder], "status"))
    jobs = job_statuses(paths for paths, _, _ in found)
    goes_on = bool(watchers_of(SweepPaths(folder)))
    standings = []
    for paths, cell, words in found:
        launcher, job = jobs.get(paths.folder, ("", JobStatus("")))
        standing = _run_status(paths, cell, " ".join(words), job, goes_on)
        row = str(cell.get("row", ""))
        standings.append(replace(standing, launcher=launcher, overrides=words, row=row))
    return standings


def _run_status(
    paths: RunPaths, cell: dict[str, Any], label: str, job: JobStatus, goes_on: bool = False
) -> RunStatus:
    """Return the state of one run. `cell`: its entry in the sweep, else empty."""
    if cell.get("outcome") in (Outcome.refused.name, Outcome.skipped.name):
        return RunStatus(paths, label, cell["outcome"], note=cell.get("reason", ""))
    known, damage = _recorded(paths, label)
    if known.state and Outcome[known.state].is_final:
        return known
    known = replace(known, total=known.total or _planned_steps(paths))
    open_end = replace(known, note="")
    if is_locked(paths.lock):
        step, loss, step_s = newest_step(paths)
        return replace(
            open_end, state=runs_table.RUNNING, step=step or known.step, loss=loss, job=job.name,
            where=job.where if job.name else _holder(paths), silent=job.silent, step_s=step_s,
        )  # fmt: skip
    if job.waits_for:
        return replace(open_end, state=runs_table.QUEUED, where=job.waits_for, job=job.name)
    if job.silent:
        return replace(open_end, state=_UNKNOWN, where=job.where, silent=job.silent)
    if goes_on and not cell.get("outcome"):
        return replace(open_end, state=runs_table.WAITING)
    if known.state:
        return known
    if damage:
        return replace(known, state=UNREADABLE, note=damage)
    if cell.get("outcome") == Outcome.crashed.name:
        # The sweep could not start the run or write its record. The cell has the reason.
        return replace(known, state=Outcome.crashed.name, note=cell.get("reason", ""))
    # A process killed before it wrote its record.
    state = runs_table.INTERRUPTED if paths.attempts.exists() else runs_table.NOT_STARTED
    step, loss, _ = newest_step(paths)
    note = missing_run(cell.get("outcome", ""), paths.folder)
    gone = f"its {job.where} is gone" if job.where and not job.name else ""
    return replace(known, state=state, step=step, loss=loss, note=note or gone)


def open_rows(folder: Path) -> str:
    """Return the progress and open configurations of `sweep.repeats=auto`, else ""."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = read_json(SweepPaths(folder).sweep)["repeats"]
        rows = [row for row in found["rows"] if row["overrides"] != row["baseline"]]
        decided = sum(row["state"] in ("higher", "lower", "same") for row in rows)
        left = ", ".join(row["name"] for row in rows if row["state"] in ("open", "futile"))
        text = f"rounds: {found['rounds']} of at most {found['max_repeats']}"
        text += f", {decided} of {len(rows)} configurations decided" if rows else ""
        return f"{text}; open: {left}" if left else text
    return ""


def is_active(folder: Path, standings: Sequence[RunStatus]) -> bool:
    """Return whether a run is active, may be active, or is watched by a sweep's process."""
    return any(s.is_active or s.silent for s in standings) or bool(watchers_in(folder))


def _holder(paths: RunPaths) -> str:
    if not (attempts := read_attempts(paths)):
        return "starting"
    return f"process {attempts[-1].get('pid')} on {attempts[-1].get('host')}"


def _runs_of(folder: Path) -> Iterator[tuple[RunPaths, dict[str, Any], tuple[str, ...]]]:
    """Yield folder, sweep cell ({} outside a sweep) and overrides of each run."""
    sweep = SweepPaths(folder)
    if sweep.sweep.exists():
        try:
            cells = read_json(sweep.sweep)["cells"]
            names = [cell.get("folder") or cell.get("run_id") or NO_FOLDER for cell in cells]
            words = [tuple(map(str, cell["overrides"])) for cell in cells]
            # Siblings of the sweep's folder, also after both were moved.
            places = [RunPaths(folder.parent / Path(name).name) for name in names]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EkeError(f"{sweep.sweep}: not a readable sweep ({error})") from error
        yield from zip(places, cells, words, strict=True)
        return
    folders = [folder]
    if not RunPaths(folder).plan.exists():
        folders = []
        with suppress(OSError), os.scandir(folder) as entries:
            for path in (Path(entry.path) for entry in entries if entry.is_dir()):
                folders += [path] if RunPaths(path).plan.exists() else []
    for paths in map(RunPaths, sorted(folders)):
        yield paths, {}, tuple(_overrides(paths).split())


def _overrides(paths: RunPaths) -> str:
    with suppress(OSError):
        first, _, _ = read_text(paths.config, RECORD_LIMIT).partition("\n")
        return first.removeprefix("#").strip() or "defaults"
    return ""


def _recorded(paths: RunPaths, label: str) -> tuple[RunStatus, str]:
    """Return a run's state by its record, "" without one, and why a record is unreadable."""
    record, damage = None, ""
    try:
        record = read_record(paths)
    except NoRecord as error:
        damage = f"{error}. The same command uses a new folder. To use this one: eke retry SWEEP"
    except UnreadableRecord as error:
        damage = str(error)
    if record is None:
        return RunStatus(paths, label, ""), damage
    note, total = record.failure.message if record.failure else "", _steps_of(record.plan)
    known = RunStatus(paths, label, record.outcome, total=total, note=note)
    return replace(known, **runs_table.progress_of(record)), damage


def _planned_steps(paths: RunPaths) -> int:
    with suppress(OSError, ValueError):
        return _steps_of(read_json(paths.plan, RECORD_LIMIT))
    return 0


def _steps_of(plan: Any) -> int:
    with suppress(LookupError, TypeError, ValueError, OverflowError):
        return int(plan["steps"]["total"])
    return 0
