"""Every run and every cell under some folders, as found: nothing is dropped, nothing computed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError
from eke.common.files import read_json
from eke.common.paths import RunPaths, SweepPaths
from eke.plan.record import (
    RECORD_LIMIT,
    Outcome,
    Record,
    UnreadableRecord,
    missing_run,
    no_runs,
    read_record,
)

NOT_RUN = "not run"
"""What stands for the outcome of a cell that has none yet."""

UNREADABLE = "unreadable"
"""What stands for the outcome of a run whose record cannot be read."""


@dataclass(frozen=True)
class Entry:
    """One cell of a sweep, or one run that belongs to none."""

    overrides: tuple[str, ...]
    outcome: str
    """A member name of Outcome, or one of the words above."""
    reason: str = ""
    """Why it did not end well."""
    row: str = ""
    """Name of the sweep definition's row; empty where there is none."""
    rule: str = ""
    """Id of the rule that refused it."""
    record: Record | None = None
    folder: Path | None = None
    """None for a cell that never had one."""
    sweep: str = ""
    """Folder name of its sweep."""
    also: tuple[str, ...] = ()
    """Names of other rows that are the very same run."""
    is_known: bool = True
    """False where neither record nor plan tells what was typed."""

    @property
    def repeat(self) -> tuple[int, int]:
        """Seed and number of the repeat: runs that differ in nothing else are repeats."""
        if self.record is None:
            typed = dict(text.lstrip("+").partition("=")[::2] for text in self.overrides)
            return _integer(typed.get("seed")), _integer(typed.get("repeat"))
        return _integer(self.record.config.get("seed")), _integer(self.record.config.get("repeat"))


@dataclass(frozen=True)
class Gathered:
    """What lies in the folders."""

    entries: tuple[Entry, ...]
    sweeps: tuple[str, ...]
    """Names of the sweep definitions, of those that have one (`guide_table`)."""
    commands: tuple[tuple[str, ...], ...]
    """What was typed for each sweep, behind `train.py`."""
    notes: tuple[str, ...]
    """What could not be read, and why."""


def gather(folders: Sequence[Path]) -> Gathered:
    """Read all records under some folders, each run once.

    Args:
        folders: runs, sweeps or folders of runs.

    Raises:
        ConfigError: there is no run in any of them.
    """
    entries: list[Entry] = []
    names: list[str] = []
    commands: list[tuple[str, ...]] = []
    notes: list[str] = []
    seen: set[Path] = set()
    # Sweeps first: a run that belongs to one has a name and an order there.
    for sweep in _unique(found for folder in folders for found in _sweeps_of(folder)):
        known = set(seen)
        try:
            content = read_json(SweepPaths(sweep).sweep)
            name, command = content.get("name"), tuple(map(str, content.get("command") or ()))
            entries += list(_cells(sweep, content["cells"], known))
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            why = f"not a readable sweep ({error}); its runs are shown by themselves"
            notes.append(f"{SweepPaths(sweep).sweep}: {why}")
            continue
        seen = known
        names += [str(name)] if name else []
        commands += [command] if command else []
    for run in _unique(found for folder in folders for found in _runs_of(folder)):
        if run not in seen:
            seen.add(run)
            entries.append(_alone(run))
    if not entries:
        raise ConfigError(no_runs(folders, "report", notes))
    notes += [f"{e.folder}: {e.reason}" for e in entries if e.outcome == UNREADABLE]
    return Gathered(tuple(entries), tuple(_unique(names)), tuple(_unique(commands)), tuple(notes))


def _sweeps_of(folder: Path) -> Iterator[Path]:
    if SweepPaths(folder).sweep.exists():
        yield folder.resolve()
        return
    for child in _children(folder):
        if SweepPaths(child).sweep.exists():
            yield child.resolve()


def _runs_of(folder: Path) -> Iterator[Path]:
    for each in (folder, *_children(folder)):
        paths = RunPaths(each)
        if paths.record.exists() or paths.plan.exists():
            yield each.resolve()


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(child for child in folder.iterdir() if child.is_dir())
    except OSError:
        return []


def _cells(sweep: Path, cells: Sequence[Any], seen: set[Path]) -> Iterator[Entry]:
    plain = [cell for cell in cells if isinstance(cell, dict)]
    runs = [_run_of(sweep, cell) for cell in plain]
    rows: dict[Path, list[str]] = {}
    for run, cell in zip(runs, plain, strict=True):
        if run is not None and cell.get("row"):
            rows.setdefault(run, []).append(str(cell["row"]))
    for run, cell in zip(runs, plain, strict=True):
        if run is not None and run in seen:
            continue  # the very same run as an earlier cell, or one of another sweep
        if run is not None:
            seen.add(run)
        yield _cell(sweep, cell, run, tuple(rows.get(run, [])[1:]) if run else ())


def _run_of(sweep: Path, cell: dict[str, Any]) -> Path | None:
    """A cell's run: beside the sweep's folder, wherever both have been moved to."""
    name = Path(cell.get("folder") or cell.get("run_id") or "").name
    return (sweep.parent / name).resolve() if name else None


def _cell(sweep: Path, cell: dict[str, Any], run: Path | None, also: tuple[str, ...] = ()) -> Entry:
    overrides = tuple(map(str, cell.get("overrides") or ()))
    row, rule = str(cell.get("row") or ""), str(cell.get("rule") or "")
    outcome, reason = str(cell.get("outcome") or NOT_RUN), str(cell.get("reason") or "")
    if run is not None and outcome not in (Outcome.refused.name, Outcome.skipped.name):
        # The record is the truth; the sweep's file may be older.
        told, why = outcome, reason
        outcome, reason, record = _read(run)
        if outcome == NOT_RUN and told == Outcome.crashed.name:  # before it could have one
            outcome, reason = told, why
        elif outcome == NOT_RUN:
            reason = missing_run("" if told == NOT_RUN else told, run)
        rule = "" if record else rule  # it has been started since
    else:
        record = None
    return Entry(overrides, outcome, reason, row, rule, record, run, sweep.name, also)


def _alone(run: Path) -> Entry:
    outcome, reason, record = _read(run)
    typed = tuple(record.overrides) if record else _typed(run)
    known = typed is not None
    return Entry(typed or (), outcome, reason, record=record, folder=run, is_known=known)


def _read(run: Path) -> tuple[str, str, Record | None]:
    """Outcome, reason and record of a run's folder."""
    try:
        record = read_record(RunPaths(run))
    except UnreadableRecord as error:
        return UNREADABLE, str(error), None
    if record is None:
        return NOT_RUN, "", None
    return record.outcome, record.failure.message if record.failure else "", record


def _typed(run: Path) -> tuple[str, ...] | None:
    """What was typed, as the plan has it; None where it cannot be read."""
    try:
        return tuple(map(str, read_json(RunPaths(run).plan, RECORD_LIMIT)["overrides"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _integer(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0


def _unique(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))
