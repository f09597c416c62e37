"""Weights & Biases report of a comparison: built offline, published on request.

wandb is imported only when a report is built. Tested with wandb 0.31 and wandb-workspaces 0.4.13.
Design decisions: notes/tracking.md.
"""

import json
import os
import re
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.files import read_json, write_json
from eke.common.paths import RunPaths
from eke.common.streams import escape, printable_line
from eke.config import schema
from eke.config.schema import TrackerMode
from eke.plan.record import Record, metrics, table
from eke.results.report.compare import Comparison
from eke.results.report.compare.load_records import Entry
from eke.results.report.compare.sentences import verdict_lines
from eke.results.report.show.export import cut, main_table
from eke.results.report.show.sections import count_outcomes
from eke.results.trackers.async_tracker import TIME, TOTAL_TOKENS
from eke.results.trackers.sync import account
from eke.results.trackers.sync.account import read_receipts
from eke.results.trackers.tracker import tracker_id


def workspaces() -> ModuleType:
    """The module `wandb_workspaces.reports.v2`; raises ConfigError if it is not installed."""
    # Disables W&B's telemetry, which waits 10 s for an unreachable host.
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    try:
        with warnings.catch_warnings():
            # wandb-workspaces 0.4: its classes use pydantic's former names.
            warnings.simplefilter("ignore", DeprecationWarning)
            import wandb_workspaces.reports.v2 as reports
    except ModuleNotFoundError:
        why = "--wandb needs the package wandb-workspaces, which is not installed"
        raise ConfigError(f'{why} -> pip install "eke[report]"') from None
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


Filter = tuple[str, list[str]]
"""What W&B filters runs by, `Group` or `ID`, and the names."""


def find_project(comparison: Comparison, project: str = "", entity: str = "") -> WandbProject:
    """Project of the runs, unless given; raises ConfigError if they are filed under several."""
    settings = [table(record.config, "tracker") for _, record in recorded(comparison)]
    return WandbProject(
        entity or _only("entity", settings),
        project or _only("project", settings) or schema.Tracker.project,
    )


def find_filter(comparison: Comparison) -> Filter | None:
    """Filter for the runs at W&B; None without runs.

    By group, if W&B has their sweeps as groups: later runs of a sweep then show up by themselves.
    By id otherwise: single runs, and cells with the record of an earlier sweep, in its group.
    """
    found = recorded(comparison)
    if not found:
        return None
    sweeps = list(dict.fromkeys(entry.sweep for entry, _ in found))
    is_grouped = all(e.sweep == table(r.config, "tracker").get("group") for e, r in found)
    if is_grouped and all(map(PLAIN.fullmatch, sweeps)):
        return "Group", sweeps
    ids = dict.fromkeys(
        tracker_id(entry.folder.name if entry.folder else record.run_id, record.run_id)
        for entry, record in found
    )
    return "ID", [each for each in ids if PLAIN.fullmatch(each)]


def recorded(comparison: Comparison) -> list[tuple[Entry, Record]]:
    """Compared runs with a record, in the report's order."""
    entries = [entry for row in comparison.rows for entry in row.variant.entries]
    return [(entry, entry.record) for entry in entries if entry.record is not None]


def _only(what: str, settings: list[dict[str, Any]]) -> str:
    found = list(dict.fromkeys(str(each.get(what) or "") for each in settings))
    if len(found) > 1:
        names = ", ".join(name or "the account's default" for name in found)
        why = f"the runs are filed under {len(found)} of them: {names}"
        fix = Fix(remark=f"eke report ... --{what} {next(filter(None, found))}")
        raise ConfigError(Problem(f"tracker.{what}", "", why, fix))
    return found[0] if found else ""


SAMPLES_PER_S, PEAK_GIB = "samples_per_s", "peak_allocated_gib"
"""Of a run's summary (eke.results.trackers.tracker)."""

MAX_FACTORS = 6
"""Factors above which runs are not grouped (W&B nests groups); a choice, not a limit of W&B."""


def factor_paths(comparison: Comparison) -> list[str]:
    """Paths in W&B's config of the factors that differ: `precision.value`, `cfg.value.train.steps`.

    W&B wraps each top-level key into `value`. Factors of cells without a run alone are omitted.
    """
    options = {group for _, record in recorded(comparison) for group in record.choices}
    known = {key for row in comparison.rows if row.variant.machine for key in row.variant.settings}
    # Options as eke.results.trackers.wandb.make_config names them.
    named = {key: f"{key.replace('.', '_')}.value" for key in options}
    return [named.get(key, f"cfg.value.{key}") for key in comparison.factors if key in known]


WIDTH, HEIGHT = 24, 8
"""Columns of W&B's grid, and rows of one panel of it."""
MAX_RUNS = 100
"""Lines and bars that a panel shows; W&B's own default is 10."""


def _run_set(
    library: ModuleType, found: Filter, place: WandbProject | None, factors: list[str]
) -> Any:
    """The compared runs, fastest first, grouped and coloured by differing factors.

    A `place` is looked up at the server; None is the report's own, which needs no server.
    """
    measured = [f"summary:{SAMPLES_PER_S}", f"summary:{PEAK_GIB}"]
    key, names = found  # plain: see PLAIN
    chosen = f"== {names[0]!r}" if len(names) == 1 else f"in {names!r}"
    groups = factors if len(factors) <= MAX_FACTORS else []
    return library.Runset(
        **(asdict(place) if place else {}),
        name="compared runs",
        filters=f"Metric({key!r}) {chosen}",
        groupby=[f"config.{path}" for path in groups],
        order=[library.OrderBy(library.SummaryMetric(SAMPLES_PER_S), ascending=False)],
        pinned_columns=[*(f"config:{path}" for path in factors), *measured],
    )


def _panels(library: ModuleType) -> list[Any]:
    half = WIDTH // 2
    # Over the runs of a group: their mean, from the lowest to the highest.
    over = {"groupby_aggfunc": "mean", "groupby_rangefunc": "minmax", "max_runs_to_show": MAX_RUNS}

    def at(row: int, column: int = 0, width: int = half) -> Any:
        return library.Layout(x=column * half, y=row * HEIGHT, w=width, h=HEIGHT)

    def lines(title: str, x: str, y: str, row: int, column: int) -> Any:
        return library.LinePlot(title=title, x=x, y=[y], layout=at(row, column), **over)

    return [
        library.ScatterPlot(
            title="samples/s over peak memory, GiB",
            x=library.SummaryMetric(PEAK_GIB),
            y=library.SummaryMetric(SAMPLES_PER_S),
            layout=at(0, width=WIDTH),
        ),
        lines("eval loss over steps", metrics.STEP, metrics.EVAL_LOSS, 1, 0),
        lines("train loss over steps", metrics.STEP, metrics.LOSS, 1, 1),
        lines("train loss over tokens", TOTAL_TOKENS, metrics.LOSS, 2, 0),
        lines("train loss over seconds of training", TIME, metrics.LOSS, 2, 1),
    ]


MAX_ROWS = 100
"""Maximum rows of the table: W&B renders the whole report in the browser. report.csv has all."""
MAX_CHARS = 300
"""Maximum characters of a table cell, for long exception messages."""
MAX_TITLE_CHARS = 128
"""Maximum length of a title in wandb-workspaces 0.4."""


def specification(comparison: Comparison, place: WandbProject, is_online: bool = False) -> Any:
    """Build the report for wandb-workspaces; raises ConfigError if that is not installed.

    It has the contents of the other formats, and is filed under `place`. With `is_online` the run
    set names the project, too, which asks the server for its number.
    """
    library = workspaces()
    blocks = []
    if found := find_filter(comparison):
        key, names = found
        which = f"group {', '.join(names)}" if key == "Group" else f"{len(names)} runs by their ids"
        live = f"Live: {escape(which)} in project {escape(place.project)}. "
        live += "The text below is of the time of writing."
        run_set = _run_set(library, found, place if is_online else None, factor_paths(comparison))
        grid = library.PanelGrid(runsets=[run_set], panels=_panels(library))
        blocks += [grid, library.MarkdownBlock(live)]
    first, *others = map(escape, verdict_lines(comparison))
    table_lines = main_table(comparison, MAX_ROWS, MAX_CHARS) if comparison.rows else []
    notes = "\n".join(f"- {escape(note)}" for note in comparison.notes)
    texts = [f"**{first}**", *others, escape(count_outcomes(comparison)), "\n".join(table_lines)]
    blocks.append(library.MarkdownBlock("\n\n".join(filter(None, [*texts, notes]))))
    titles = comparison.sweeps or tuple(Path(folder).name for folder in comparison.folders)
    return library.Report(
        # None would cause a request to the server.
        entity=place.entity,
        project=place.project,
        title=cut(printable_line(f"eke: {', '.join(titles) or 'runs'}"), MAX_TITLE_CHARS),
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


SAVE_S = 60.0
"""Time limit without the login: four requests, for which W&B allows 19 s each."""

FILE_VERSION = 1


class PublishedReport(NamedTuple):
    """A published report, stored with the other files so that it can be updated."""

    server: str
    entity: str
    project: str
    id: str
    url: str


def publish(comparison: Comparison, place: WandbProject, file: Path) -> tuple[str, bool, int]:
    """Save the report, and store its id in `file`, which remembers earlier ones.

    An empty entity of `place` is the account's default. Returns the URL, whether it is new, and the
    number of runs that the server may lack.

    Raises:
        ConfigError: an API key is missing or refused, or the server knows no such project.
        NoAnswer, Refusal: as of `account.bounded`.
        OSError: `file` cannot be written.
    """
    try:
        others = [PublishedReport(**each) for each in read_json(file)["published"]]
    except (OSError, ValueError, TypeError, KeyError):  # missing or invalid
        others = []
    with account.session() as (user, _):
        place = replace(place, entity=place.entity or user.entity)
        if not place.entity:
            raise ConfigError("W&B's server names no default entity -> --entity NAME")
        where = (user.server, place.entity, place.project)
        known_id = next((p.id for p in others if p[:3] == where), "")
        answer = account.bounded(lambda: _save(comparison, place, known_id), SAVE_S)
    if answer is None:
        raise ConfigError(
            f"project {place}: the server knows none of this name, or not for this account\n"
            "  -> eke sync RUNS   (sends the runs, and makes it), or --project NAME, --entity NAME"
        )
    report_id, url = answer
    kept = [p for p in others if p[:3] != where]
    content = [each._asdict() for each in (*kept, PublishedReport(*where, report_id, url))]
    write_json(file, {"schema_version": FILE_VERSION, "published": content})
    return url, report_id != known_id, count_missing(comparison, where)


def count_missing(comparison: Comparison, where: tuple[str, str, str]) -> int:
    """Count runs that the server may lack: no receipt of `eke sync`, and not run online."""
    count = 0
    for entry, record in recorded(comparison):
        settings = table(record.config, "tracker")
        is_online = settings.get("mode") == TrackerMode.online.value
        if is_online and settings.get("option") == "wandb" and settings.get("project") == where[2]:
            continue
        receipts = read_receipts(RunPaths(entry.folder)) if entry.folder else []
        count += not any(receipt.place == where for receipt in receipts)
    return count


def _save(comparison: Comparison, place: WandbProject, known_id: str) -> tuple[str, str] | None:
    """Id and address of the saved report; None when there is no such project."""
    import wandb
    from wandb_workspaces._graphql import execute_graphql
    from wandb_workspaces.reports.v2 import gql

    api = wandb.Api(timeout=int(account.ANSWER_S))
    names = {"entityName": place.entity, "projectName": place.project}
    # `Report.save` would create the project, also for a misspelled name.
    if not execute_graphql(api, gql.projectInternalId, names).get("project"):
        return None
    report = specification(comparison, place, is_online=True)
    if known_id:
        try:
            view = execute_graphql(api, gql.view_report, {"reportId": known_id}).get("view")
        except Exception as error:  # several classes for an unknown id
            if "not found" not in str(error).lower():
                raise
            view = None
        report.id = known_id if view else ""
    report.save()
    return str(report.id), str(report.url)
