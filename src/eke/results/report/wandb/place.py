"""Where the compared runs are at W&B, and how a panel finds them there."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eke.common.errors import ConfigError, Problem
from eke.config import schema
from eke.plan.record import Record
from eke.results.report.compare import Comparison
from eke.results.report.compare.load_records import Entry
from eke.results.trackers.describe import tracker_id

PLAIN = re.compile(r"[A-Za-z0-9_.\- ]+")
"""Names that wandb-workspaces 0.4 filters by as they are: it writes a filter as an expression and
reads it back, where `=` becomes `==`, `<` becomes `<=` and a quotation mark ends the name."""


@dataclass(frozen=True)
class Place:
    """A project at W&B."""

    entity: str
    """Team or user; empty for the account's default."""
    project: str

    def __str__(self) -> str:
        return f"{self.entity}/{self.project}" if self.entity else self.project


@dataclass(frozen=True)
class Filter:
    """Which of a project's runs are compared: those of some groups, or some by their ids."""

    groups: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.groups:
            return f"group {', '.join(self.groups)}"
        return f"{len(self.ids)} runs by their ids"


def find_place(comparison: Comparison, project: str = "", entity: str = "") -> Place:
    """The one project that the runs are filed under.

    Args:
        comparison: what is reported.
        project: instead of the runs' own `tracker.project`.
        entity: instead of their `tracker.entity`.

    Raises:
        ConfigError: the runs are filed under several.
    """
    settings = [tracker_settings(record) for _, record in recorded(comparison)]
    return Place(
        entity or _only("entity", [str(each.get("entity") or "") for each in settings]),
        project
        or _only("project", [str(each.get("project") or "") for each in settings])
        or schema.Tracker.project,
    )


def find_filter(comparison: Comparison) -> Filter | None:
    """How the runs are found at W&B; None where nothing has run.

    By group where all are of sweeps that W&B has as groups: runs that the sweep gains later then
    show up by themselves. By id otherwise: single runs, and cells that were answered by the record
    of an earlier sweep, whose group is that sweep.
    """
    found = recorded(comparison)
    if not found:
        return None
    sweeps = tuple(dict.fromkeys(entry.sweep for entry, _ in found))
    is_grouped = all(entry.sweep == tracker_settings(each).get("group") for entry, each in found)
    if is_grouped and all(map(PLAIN.fullmatch, sweeps)):
        return Filter(groups=sweeps)
    ids = dict.fromkeys(run_id(entry, record) for entry, record in found)
    return Filter(ids=tuple(each for each in ids if PLAIN.fullmatch(each)))


def recorded(comparison: Comparison) -> list[tuple[Entry, Record]]:
    """Every compared run that has a record, in the report's order."""
    return list(_recorded(comparison))


def run_id(entry: Entry, record: Record) -> str:
    """The run's id at W&B."""
    return tracker_id(entry.folder.name if entry.folder else record.run_id, record.run_id)


def tracker_settings(record: Record) -> dict[str, Any]:
    """The record's `tracker.*`; empty where another version wrote something else."""
    found = record.config.get("tracker")
    return found if isinstance(found, dict) else {}


def _recorded(comparison: Comparison) -> Iterator[tuple[Entry, Record]]:
    for row in comparison.rows:
        for entry in row.variant.entries:
            if entry.record is not None:
                yield entry, entry.record


def _only(what: str, values: list[str]) -> str:
    found = list(dict.fromkeys(values))
    if len(found) > 1:
        names = ", ".join(name or "the account's default" for name in found)
        named = next(name for name in found if name)
        why = f"the runs are filed under {len(found)} of them: {names}"
        raise ConfigError(Problem(f"tracker.{what}", "", why, f"eke report ... --{what} {named}"))
    return found[0] if found else ""
