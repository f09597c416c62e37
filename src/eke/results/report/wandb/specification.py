"""W&B report specification: run filter, panels over logged keys, and escaped Markdown."""

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from eke.common.errors import ConfigError, Fix, Problem
from eke.config import schema
from eke.plan.record import Record, metrics
from eke.results.report.compare import Comparison
from eke.results.report.compare.claims import verdict_lines
from eke.results.report.compare.comparison import MARKS
from eke.results.report.compare.load_records import Entry
from eke.results.report.show.export import escape, markdown_table
from eke.results.report.show.sections import Section, columns, count_outcomes, provenance, sections
from eke.results.trackers.async_tracker import TIME as TIME
from eke.results.trackers.tracker import tracker_id

INSTALL = 'pip install "eke[report]"'


def workspaces() -> ModuleType:
    """The module `wandb_workspaces.reports.v2`: reports, blocks and panels.

    Raises:
        ConfigError: it is not installed.
    """
    # Disables W&B's telemetry, which waits 10 s for an unreachable host.
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    try:
        with warnings.catch_warnings():
            # wandb-workspaces 0.4: its classes use pydantic's former names.
            warnings.simplefilter("ignore", DeprecationWarning)
            import wandb_workspaces.reports.v2 as reports
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("wandb_workspaces", "wandb"):
            raise
        raise ConfigError(
            f"--wandb needs the package wandb-workspaces, which is not installed -> {INSTALL}"
        ) from None
    return reports


PLAIN = re.compile(r"[A-Za-z0-9_.\- ]+")
"""Names that wandb-workspaces 0.4 filters by as they are: it writes a filter as an expression and
reads it back, where `=` becomes `==`, `<` becomes `<=` and a quotation mark ends the name."""


@dataclass(frozen=True)
class WandbProject:
    """A project at W&B."""

    entity: str
    """Team or user; empty for the account's default."""
    project: str

    def __str__(self) -> str:
        return f"{self.entity}/{self.project}" if self.entity else self.project


@dataclass(frozen=True)
class Filter:
    """Compared runs of a project, by group or by id."""

    groups: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.groups:
            return f"group {', '.join(self.groups)}"
        return f"{len(self.ids)} runs by their ids"


def find_project(comparison: Comparison, project: str = "", entity: str = "") -> WandbProject:
    """Find the project of the runs.

    Args:
        comparison: what is reported.
        project: instead of the runs' own `tracker.project`.
        entity: instead of their `tracker.entity`.

    Raises:
        ConfigError: the runs are filed under several.
    """
    settings = [tracker_settings(record) for _, record in recorded(comparison)]
    return WandbProject(
        entity or _only("entity", [str(each.get("entity") or "") for each in settings]),
        project
        or _only("project", [str(each.get("project") or "") for each in settings])
        or schema.Tracker.project,
    )


def find_filter(comparison: Comparison) -> Filter | None:
    """Filter for the runs at W&B; None without runs.

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
    ids = dict.fromkeys(wandb_run_id(entry, record) for entry, record in found)
    return Filter(ids=tuple(each for each in ids if PLAIN.fullmatch(each)))


def recorded(comparison: Comparison) -> list[tuple[Entry, Record]]:
    """Compared runs with a record, in the report's order."""
    return list(_recorded(comparison))


def wandb_run_id(entry: Entry, record: Record) -> str:
    """The run's id at W&B."""
    return tracker_id(entry.folder.name if entry.folder else record.run_id, record.run_id)


def tracker_settings(record: Record) -> dict[str, Any]:
    """The record's `tracker.*`; empty if another version wrote it differently."""
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
        raise ConfigError(
            Problem(f"tracker.{what}", "", why, Fix(remark=f"eke report ... --{what} {named}"))
        )
    return found[0] if found else ""


SAMPLES_PER_S, PEAK_BYTES = "samples_per_s", "peak_allocated_bytes"
"""Of a run's summary (eke.results.trackers.tracker)."""
STEP, LOSS = metrics.STEP, metrics.LOSS
"""Of its rows, as is TIME."""

MAX_FACTORS = 6
"""Factors above which runs are not grouped (W&B nests groups); a choice, not a limit of W&B."""


def factor_paths(comparison: Comparison) -> list[str]:
    """Paths in W&B's config of the factors that differ, `precision.value`.

    Factors that only cells without a run have are omitted.
    """
    records = [record for _, record in recorded(comparison)]
    paths = [path for key in comparison.factors if (path := _path(key, records))]
    return list(dict.fromkeys(paths))


def grouping(comparison: Comparison) -> list[str]:
    """Factors for grouping and colour; none if too many differ."""
    paths = factor_paths(comparison)
    return paths if len(paths) <= MAX_FACTORS else []


def _path(key: str, records: list[Record]) -> str:
    """`precision` is a scalar at the top, `optimizer.lr` is below `cfg`; else empty.

    W&B wraps each top-level key into `value`.
    """
    if any(key in record.choices for record in records):
        return (
            f"{key.replace('.', '_')}.value"  # as eke.results.trackers.wandb.make_config names it
        )
    if any(_has(record.config, key) for record in records):
        return f"cfg.value.{key}"
    return ""


def _has(tree: Mapping[str, Any], path: str) -> bool:
    *parents, name = path.split(".")
    for parent in parents:
        branch = tree.get(parent)
        if not isinstance(branch, Mapping):
            return False
        tree = branch
    return name in tree


WIDTH, HEIGHT = 24, 8
"""Columns of W&B's grid, and rows of one panel of it."""
MAX_RUNS = 100
"""Lines and bars that a panel shows; W&B's own default is 10."""

SPEED_TITLE, MEMORY_TITLE = "samples/s", "peak memory, bytes"


def panel_grid(
    library: ModuleType,
    found: Filter,
    place: WandbProject | None,
    factors: list[str],
    groups: list[str],
) -> Any:
    """All panels over one run set.

    Args:
        library: wandb_workspaces.reports.v2.
        found: which runs.
        place: their project, looked up at the server; None for the report's own, which needs none.
        factors: paths in W&B's config of what differs.
        groups: those of them that runs are grouped and coloured by.
    """
    return library.PanelGrid(
        runsets=[run_set(library, found, place, factors, groups)], panels=_panels(library)
    )


def run_set(
    library: ModuleType,
    found: Filter,
    place: WandbProject | None,
    factors: list[str],
    groups: list[str],
) -> Any:
    """The compared runs, fastest first, grouped by differing factors."""
    where = {"entity": place.entity, "project": place.project} if place else {}
    measured = [f"summary:{SAMPLES_PER_S}", f"summary:{PEAK_BYTES}"]
    return library.Runset(
        **where,
        name="compared runs",
        filters=_expression(found),
        groupby=[f"config.{path}" for path in groups],
        order=[library.OrderBy(library.SummaryMetric(SAMPLES_PER_S), ascending=False)],
        pinned_columns=[*(f"config:{path}" for path in factors), *measured],
    )


def _expression(found: Filter) -> str:
    """As wandb-workspaces reads it; the names are plain (see Filter)."""
    key, names = ("Group", found.groups) if found.groups else ("ID", found.ids)
    chosen = f"== {names[0]!r}" if len(names) == 1 else f"in {list(names)!r}"
    return f"Metric({key!r}) {chosen}"


def _panels(library: ModuleType) -> list[Any]:
    half = WIDTH // 2
    # Over the runs of a group: their mean, from the lowest to the highest.
    over = {"groupby_aggfunc": "mean", "groupby_rangefunc": "minmax", "max_runs_to_show": MAX_RUNS}

    def at(row: int, column: int = 0, width: int = half) -> Any:
        return library.Layout(x=column * half, y=row * HEIGHT, w=width, h=HEIGHT)

    def bars(title: str, key: str, column: int) -> Any:
        return library.BarPlot(
            title=title, metrics=[key], max_bars_to_show=MAX_RUNS, layout=at(1, column), **over
        )

    def lines(title: str, key: str, unit: str, column: int) -> Any:
        return library.LinePlot(
            title=title, x=key, y=[LOSS], title_x=unit, title_y="train loss",
            layout=at(2, column), **over,
        )  # fmt: skip

    return [
        library.ScatterPlot(
            title=f"{SPEED_TITLE} over {MEMORY_TITLE}",
            x=library.SummaryMetric(PEAK_BYTES),
            y=library.SummaryMetric(SAMPLES_PER_S),
            layout=at(0, width=WIDTH),
        ),
        bars(SPEED_TITLE, SAMPLES_PER_S, 0),
        bars(MEMORY_TITLE, PEAK_BYTES, 1),
        lines("train loss over steps", STEP, "step", 0),
        lines("train loss over training time", TIME, "s of training steps", 1),
        library.RunComparer(diff_only="split", layout=at(3, width=WIDTH)),
    ]


MAX_ROWS, MAX_SECTION_ROWS = 100, 50
"""Maximum rows of each table: W&B renders the whole report in the browser. report.csv has all."""
MAX_CHARS = 300
"""Maximum characters of a table cell, for long exception messages."""
MAX_TITLE_CHARS = 128
"""Maximum length of a title in wandb-workspaces 0.4."""


def title(comparison: Comparison) -> str:
    """Title: names of the sweeps, else the folders."""
    names = comparison.sweeps or tuple(Path(folder).name for folder in comparison.folders)
    return cut(json_safe(f"eke: {', '.join(names) or 'runs'}"), MAX_TITLE_CHARS)


def opening(comparison: Comparison) -> str:
    """Verdict, and number of runs by outcome."""
    first, *others = verdict_lines(comparison)
    lines = [
        f"**{escape_markdown(first)}**",
        *map(escape_markdown, others),
        escape_markdown(count_outcomes(comparison)),
    ]
    return "\n\n".join(lines)


def live(found: Filter, place: WandbProject) -> str:
    """Note on the panels, which may show other runs than the tables."""
    return (
        f"These panels are live: {escape_markdown(str(found))} in project "
        f"{escape_markdown(place.project)}, with the server's current data. "
        "Tables and text are from the time of writing."
    )


def main_table(comparison: Comparison) -> str:
    """One line for each configuration."""
    shown = columns(comparison, wide=False)
    cells = [[_cell(column.text(row)) for column in shown] for row in comparison.rows[:MAX_ROWS]]
    lines = markdown_table([c.title for c in shown], cells, [c.is_number for c in shown])
    more = len(comparison.rows) - MAX_ROWS
    rest = ["", f"... and {more} more rows: in report.csv"] if more > 0 else []
    return _guarded("\n".join([*lines, *rest, "", MARKS]))


def section_table(section: Section) -> str:
    """A section without its title."""
    rows = [[_cell(cell) for cell in row] for row in section.rows[:MAX_SECTION_ROWS]]
    lines = markdown_table(section.head, rows, [False] * len(section.head))
    more = len(section.rows) - MAX_SECTION_ROWS
    rest = ["", f"... and {more} more rows: in report.md"] if more > 0 else []
    note = ["", escape(json_safe(section.note))] if section.note else []
    return _guarded("\n".join([*lines, *rest, *note]))


def notes_block(comparison: Comparison) -> str:
    """Notes of the comparison as a list."""
    return "\n".join(f"- {escape_markdown(note)}" for note in comparison.notes)


def escape_markdown(text: str) -> str:
    """Escape a sentence: no mark-up, formula or heading."""
    flat = _guarded(escape(cut(json_safe(text), 10 * MAX_CHARS)))
    return f"\\{flat}" if flat[:1] in ("#", "+", "-", "=") else flat


def cut(text: str, limit: int) -> str:
    """Text of at most `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def json_safe(text: str) -> str:
    """Remove surrogates and control characters, which servers reject."""
    whole = text.encode(errors="replace").decode()
    return "".join(sign if sign.isprintable() else " " for sign in whole)


def _cell(text: str) -> str:
    return cut(json_safe(text), MAX_CHARS)


def _guarded(text: str) -> str:
    """Escape dollar signs (formulas in W&B) and strike-through."""
    return text.replace("$", "\\$").replace("~", "\\~")


def specification(
    comparison: Comparison, place: WandbProject, repeats: bool = False, is_online: bool = False
) -> Any:
    """Build the report as an object of wandb-workspaces, with the contents of the other formats.

    Args:
        comparison: what is reported.
        place: the project that it, and the runs, are filed under.
        repeats: list every run, too.
        is_online: name the project to the run set, too, which asks the server for its number;
            without, W&B takes the report's own.

    Raises:
        ConfigError: wandb-workspaces is not installed.
    """
    library = workspaces()
    blocks = [library.MarkdownBlock(opening(comparison))]
    if comparison.rows:
        blocks += _titled("Configurations", main_table(comparison))
    if found := find_filter(comparison):
        factors, groups = factor_paths(comparison), grouping(comparison)
        where = place if is_online else None
        blocks += _titled("Charts", live(found, place))
        blocks.append(panel_grid(library, found, where, factors, groups))
    for section in (*sections(comparison, repeats), provenance(comparison)):
        blocks += _titled(section.title, section_table(section))
    if comparison.notes:
        blocks += _titled("Notes", notes_block(comparison))
    return library.Report(
        # None would cause a request to the server.
        entity=place.entity,
        project=place.project,
        title=title(comparison),
        description="made by eke report",
        blocks=blocks,
        width="fluid",
    )


def dump(report: Any) -> str:
    """JSON that `save` sends; `spec` is the parsed string of its mutation `upsertView`."""
    model = report._to_model()  # wandb-workspaces 0.4.13 has no public method
    content = {
        "displayName": model.display_name,
        "description": model.description,
        "entityName": model.project.entity_name,
        "projectName": model.project.name,
        "type": "runs",
        "spec": json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True)),
    }
    return json.dumps(content, indent=1) + "\n"


def _titled(title: str, text: str) -> list[Any]:
    library = workspaces()
    return [library.H2(title), library.MarkdownBlock(text)]
