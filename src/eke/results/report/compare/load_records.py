"""Records of runs and sweeps in some folders, and the keys in which they differ."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError
from eke.common.files import read_json
from eke.common.paths import RunPaths, SweepPaths
from eke.common.text import first_line, format_value
from eke.config.schema import VARIANTS, Config
from eke.config.schema.fields import Affects
from eke.plan.identity import PRESENTATION, meaningful
from eke.plan.record import (
    RECORD_LIMIT,
    Outcome,
    Record,
    UnreadableRecord,
    missing_run,
    no_runs,
    read_record,
)
from eke.results.report.compare.measures import measured_values
from eke.results.report.compare.statistics import ALPHA
from eke.results.report.compare.until_decided import RowDecision, decision_of
from eke.rules.techniques import TECHNIQUES, Numerics

NOT_RUN = "not run"
"""Outcome shown for a sweep's run without one."""

UNREADABLE = "unreadable"
"""Outcome shown for a run whose record is unreadable."""

RunKey = tuple[str, ...]
"""Configuration of a sweep: its overrides without seed and repeat."""


@dataclass(frozen=True, eq=False)
class Entry:
    """Run of a sweep, or one outside of sweeps."""

    overrides: tuple[str, ...]
    outcome: str
    """Member name of Outcome, NOT_RUN or UNREADABLE."""
    reason: str = ""
    rows: tuple[str, ...] = ()
    """Names of the sweep definition's rows with this run, if any."""
    rule: str = ""
    """Id of the rule that rejected it."""
    record: Record | None = None
    folder: Path | None = None
    """None for a run that never started."""
    sweep: str = ""
    """Folder name of its sweep."""
    is_known: bool = True
    """False if neither record nor plan has the overrides."""

    @property
    def repeat(self) -> tuple[int, int]:
        """Seed and number of the repeat, the only difference between repeats."""
        typed = (text.lstrip("+").partition("=")[::2] for text in self.overrides)
        known: Mapping[str, Any] = self.record.config if self.record else dict(typed)
        return _integer(known.get("seed")), _integer(known.get("repeat"))

    @cached_property
    def measures(self) -> dict[str, float]:
        """Key of a measure -> value, or empty without a record."""
        return measured_values(self.record) if self.record else {}

    @property
    def row(self) -> str:
        """Name of the first row."""
        return next(iter(self.rows), "")


@dataclass(frozen=True)
class LoadedRecords:
    """Contents of the folders."""

    entries: tuple[Entry, ...]
    sweeps: tuple[str, ...]
    """Names of the sweep definitions (`guide_table`)."""
    commands: tuple[tuple[str, ...], ...]
    """Command-line arguments of each sweep."""
    notes: tuple[str, ...]
    """Files that could not be read, and why."""
    level: float = ALPHA
    """Chance of a false claim among the comparisons with one baseline, with `sweep.repeats=auto` at
    each look: the smallest of several sweeps."""
    decided: Mapping[tuple[RunKey, RunKey], RowDecision] = field(default_factory=dict)
    """Configuration and its baseline -> decision of `sweep.repeats=auto`, which stays."""


def gather(folders: Sequence[Path]) -> LoadedRecords:
    """Read the records of runs, sweeps or folders of runs, each once (ConfigError: no runs)."""
    entries: list[Entry] = []
    names: list[str] = []
    commands: list[tuple[str, ...]] = []
    notes: list[str] = []
    level, decided = ALPHA, dict[tuple[RunKey, RunKey], RowDecision]()
    seen: set[Path] = set()
    # Sweeps first: a run of a sweep has a name and an order there.
    for sweep in _unique(found for folder in folders for found in _sweeps_of(folder)):
        try:
            content = read_json(SweepPaths(sweep).sweep)
            name, command = content.get("name"), tuple(map(str, content.get("command") or ()))
            repeats = content.get("repeats") or {"level": ALPHA, "rows": []}
            level = min(level, float(repeats["level"]))
            rows = dict(map(decision_of, repeats["rows"]))
            decided |= {(key, row.baseline): row for key, row in rows.items()}
            entries += _runs_of(sweep, content["cells"], seen)
        except Exception as error:  # a file of others may hold anything
            why = f"not a readable sweep ({first_line(error)}); its runs are listed individually"
            notes.append(f"{SweepPaths(sweep).sweep}: {why}")
            continue
        names += [str(name)] if name else []
        commands += [command] if command else []
    places = (each for folder in folders for each in (folder, *_children(folder)))
    for run in _unique(each.resolve() for each in places if _is_run(each)):
        if run not in seen:
            seen.add(run)
            entries.append(_entry_of_run(run))
    if not entries:
        raise ConfigError(no_runs(folders, "report", notes))
    first: dict[str, Path | None] = {}
    for entry in list(entries):  # people copy runs to keep them
        original = first.setdefault(repr(entry.record), entry.folder)
        if entry.record and original != entry.folder:
            entries.remove(entry)
            notes.append(f"{entry.folder}: a copy of {original}, counted once")
    notes += [f"{e.folder}: {e.reason}" for e in entries if e.outcome == UNREADABLE]
    definitions = tuple(_unique(names)), tuple(_unique(commands))
    return LoadedRecords(tuple(entries), *definitions, tuple(notes), level, decided)


def _sweeps_of(folder: Path) -> Iterator[Path]:
    is_sweep = os.path.exists(SweepPaths(folder).sweep)  # False without permission
    for each in [folder] if is_sweep else _children(folder):
        if os.path.exists(SweepPaths(each).sweep):
            yield each.resolve()


def _is_run(folder: Path) -> bool:
    try:
        return RunPaths(folder).is_run
    except OSError:  # no permission: a run that cannot be read
        return True


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(child for child in folder.iterdir() if child.is_dir())
    except OSError:
        return []


def _runs_of(sweep: Path, cells: Sequence[Any], seen: set[Path]) -> list[Entry]:
    """Return a sweep's runs in their order, each once, with the names of all its rows.

    Runs are next to the sweep's folder: both may have been moved. A run that never started is known
    by its number.
    """
    rows: dict[Path | int, list[str]] = {}
    kept: dict[Path | int, dict[str, Any]] = {}
    for number, cell in enumerate(each for each in cells if isinstance(each, dict)):
        name = Path(cell.get("folder") or cell.get("run_id") or "").name
        run = (sweep.parent / name).resolve() if name else number
        rows.setdefault(run, []).extend([str(cell["row"])] if cell.get("row") else [])
        if run not in seen:  # as a run of another sweep
            kept.setdefault(run, cell)
    seen.update(run for run in kept if isinstance(run, Path))
    return [
        _run_of(sweep, cell, run if isinstance(run, Path) else None, tuple(rows[run]))
        for run, cell in kept.items()
    ]


def _run_of(sweep: Path, cell: dict[str, Any], run: Path | None, rows: tuple[str, ...]) -> Entry:
    overrides, rule = tuple(map(str, cell.get("overrides") or ())), str(cell.get("rule") or "")
    before = str(cell.get("outcome") or NOT_RUN), str(cell.get("reason") or "")
    (outcome, reason), record = before, None
    if run is not None and outcome not in (Outcome.refused.name, Outcome.skipped.name):
        # The record is authoritative; sweep.json may be older.
        outcome, reason, record = _read(run)
        if outcome == NOT_RUN and before[0] == Outcome.crashed.name:  # before it had a record
            outcome, reason = before
        elif outcome == NOT_RUN:
            reason = missing_run("" if before[0] == NOT_RUN else before[0], run)
        rule = "" if record else rule  # it was started later
    return Entry(overrides, outcome, reason, rows, rule, record, run, sweep.name)


def _entry_of_run(run: Path) -> Entry:
    outcome, reason, record = _read(run)
    typed: Sequence[Any] | None = record.overrides if record else None
    try:
        typed = typed if record else read_json(RunPaths(run).plan, RECORD_LIMIT)["overrides"]
        overrides, is_known = tuple(map(str, typed or ())), True
    except Exception:  # a plan of others may hold anything
        overrides, is_known = (), False
    return Entry(overrides, outcome, reason, record=record, folder=run, is_known=is_known)


def _read(run: Path) -> tuple[str, str, Record | None]:
    try:
        record = read_record(RunPaths(run))
    except UnreadableRecord as error:
        return UNREADABLE, str(error), None
    if record is None:
        return NOT_RUN, "", None
    return record.outcome, record.failure.message if record.failure else "", record


def _integer(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0


def _unique(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))


Factors = Mapping[str, str]
"""Key path or group -> value as text."""

_REPEATED = ("seed", "repeat")
"""Keys of repeats: runs that only differ in these share a configuration."""

_SUMMARIES = ("recipe", "experiment")
"""Groups that only select options of other groups, which are compared instead."""

ABSENT = ""
"""Value of a key that a configuration lacks."""


def key_of(overrides: Sequence[str]) -> RunKey:
    """Return the configuration of a run."""
    return tuple(text for text in overrides if not text.startswith(("repeat=", "seed=")))


def configuration(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a record, without names and keys of repeats."""
    try:
        kept = meaningful(config)
    except (AttributeError, KeyError, TypeError):  # written with another version of the schema
        kept = {key: value for key, value in config.items() if key not in PRESENTATION}
    return {key: value for key, value in kept.items() if key not in _REPEATED}


def settings_of(config: dict[str, Any], choices: Mapping[str, Any]) -> dict[str, str]:
    """Return the option of every group and the value of every key of a configuration, as text."""
    skipped = (*PRESENTATION, *_SUMMARIES)
    chosen = {group: str(option) for group, option in choices.items() if group not in skipped}
    return {**chosen, **_leaves(configuration(config))}


def typed_settings(overrides: Sequence[str]) -> dict[str, str]:
    """Return the settings in the overrides, for a run without a record."""
    pairs = (text.lstrip("+").partition("=")[::2] for text in overrides)
    return {
        key: value for key, value in pairs
        if key.split(".")[0] not in PRESENTATION and key not in (*_REPEATED, *_SUMMARIES)
    }  # fmt: skip


class RunSettings:
    """Settings of the configurations with a record, and the overrides of each."""

    def __init__(self, found: Sequence[Factors], overrides: Sequence[Sequence[str]]) -> None:
        self._found = found
        self._typed = [typed_settings(each) for each in overrides]

    def differing(self) -> list[str]:
        """Return the keys in which configurations differ, groups first.

        A key determined by its group's option is omitted: `optimizer=adafactor` is enough.
        """
        known = dict.fromkeys(key for each in self._found for key in each)
        keys = [key for key in known if len({each.get(key, ABSENT) for each in self._found}) > 1]
        groups = [key for key in keys if "." not in key]
        return groups + [key for key in keys if "." in key and not self._follows(key)]

    def _follows(self, key: str) -> bool:
        """Return whether the option of its group determines a key."""
        group = key.split(".")[0]
        chosen = [each for each in self._found if group in each]
        return len({each[group] for each in chosen}) > 1 and _determines(group, key, chosen)

    def usual(self, key: str) -> str:
        """Return the value of a key without an override, or ABSENT if it always has one."""
        pairs = zip(self._found, self._typed, strict=True)
        values = {each.get(key, ABSENT) for each, mine in pairs if key not in mine}
        return values.pop() if len(values) == 1 else ABSENT

    def complete(self, keys: Sequence[str], lone: Sequence[Factors]) -> list[str]:
        """Return `keys` and keys in which runs without a record differ, for labels."""
        more = dict.fromkeys(key for each in lone for key in each if key not in keys)
        usuals = {key: self.usual(key) for key in more}
        both = (*lone, *self._found)
        return [*keys, *(k for k in more if len({each.get(k, usuals[k]) for each in both}) > 1)]

    def implied(self, keys: Sequence[str]) -> list[frozenset[str]]:
        """Return the keys of each configuration whose value is its option's default.

        It is the single value of a key in all configurations that do not override it.
        """
        below = [(key, key.split(".")[0]) for key in keys if "." in key]
        brought: dict[tuple[str, str], set[str]] = {}
        for each, mine in zip(self._found, self._typed, strict=True):
            for key, group in below:
                if key not in mine and group in each:
                    brought.setdefault((key, each[group]), set()).add(each.get(key, ABSENT))
        return [
            frozenset(
                key for key, group in below
                if brought.get((key, each.get(group, ABSENT))) == {each.get(key, ABSENT)}
            )
            for each in self._found
        ]  # fmt: skip

    def telling(self, keys: Sequence[str]) -> list[Factors]:
        """Return the distinguishing settings of each configuration, without redundant ones.

        Overridden keys are always kept. Others are omitted if all configurations with the same
        option agree on them, or if they are never overridden (a checkpoint's hash, fine-tuning's
        learning rate) and an overridden key determines them.
        """
        overridden = {key for mine in self._typed for key in mine}

        @cache  # there are many configurations and few options
        def is_news(key: str, group: str, option: str) -> bool:
            alike = [each for each in self._found if each.get(group) == option]
            agree = len({each.get(key, ABSENT) for each in alike}) == 1
            if len(alike) < len(self._found) and agree:
                return False
            set_keys = (each for each in keys if each in overridden)
            return key in overridden or not any(_determines(k, key, alike) for k in set_keys)

        def is_told(key: str, one: Factors) -> bool:
            group = key.split(".")[0]
            return "." not in key or group not in one or is_news(key, group, one[group])

        return [
            {key: one[key] for key in keys if key in one and (key in mine or is_told(key, one))}
            for one, mine in zip(self._found, self._typed, strict=True)
        ]


def _determines(one: str, other: str, found: Sequence[Factors]) -> bool:
    """Return whether configurations that agree on one key agree on the other."""
    pairs = {(each.get(one, ABSENT), each.get(other, ABSENT)) for each in found}
    return len(pairs) == len({value for value, _ in pairs})


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    leaves: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= _leaves(value, f"{prefix}{key}.")
        elif key != "option":
            leaves[f"{prefix}{key}"] = format_value(value)
    return leaves


def affects(key: str, values: Collection[str]) -> Affects:
    """Return the class of a key's difference, or *both* if one of the values changes more.

    `key` is a path of the configuration or a group. A key of another version counts as *both*.
    """
    found = _metadata().get(key)
    while found is None and "." in key:  # below a key whose value is a mapping
        key = key.rpartition(".")[0]
        found = _metadata().get(key)
    if found is None:
        return Affects.both
    is_off = found.get("is_off_at_zero") and not all(map(_is_positive, values))
    techniques = [TECHNIQUES.get(f"{key}={value}") for value in values]
    if is_off or any(each and each.numerics is Numerics.reduced for each in techniques):
        return Affects.both
    return Affects(found["affects"])


@cache
def _metadata() -> dict[str, Mapping[str, Any]]:
    """Return metadata by group and key. Keys without a class have the class of their group."""
    found: dict[str, Mapping[str, Any]] = {}
    for group in fields(Config):
        found[group.name] = group.metadata
        for cls in (group.default_factory, *VARIANTS.get(group.name, {}).values()):
            for each in fields(cls) if is_dataclass(cls) else ():
                known = each.metadata if "affects" in each.metadata else group.metadata
                found.setdefault(f"{group.name}.{each.name}", known)
    return found


def _is_positive(value: str) -> bool:
    try:
        return float(value) > 0
    except ValueError:
        return False
