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
from typing import Any

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.files import read_json, write_json
from eke.common.output import escape, printable_line
from eke.common.paths import RunPaths
from eke.config import schema
from eke.config.schema import TrackerMode
from eke.plan.record import Record, metrics, table
from eke.results.report.compare import Comparison
from eke.results.report.compare.load_records import Entry
from eke.results.report.compare.sentences import verdict_lines
from eke.results.report.show.file_formats import cut, main_table
from eke.results.report.show.report_sections import count_outcomes
from eke.results.trackers.async_tracker import TIME, TOTAL_TOKENS
from eke.results.trackers.sync import account
from eke.results.trackers.sync.account import read_receipts
from eke.results.trackers.tracker import tracker_id

_PLAIN = re.compile(r"[A-Za-z0-9_.\- ]+")
"""Names that wandb-workspaces 0.4 can filter by.

It parses its own filter expressions, where `=` becomes `==`, `<` becomes `<=` and a quotation mark
ends the name.
"""

SAMPLES_PER_S, PEAK_GIB = "samples_per_s", "peak_allocated_gib"
"""Keys of a run's summary (eke.results.trackers.tracker)."""

MAX_FACTORS = 6
"""Factors above which runs are not grouped, as W&B nests groups. Not a limit of W&B."""

MAX_TABLE_ROWS = 100
"""Maximum rows of the table, as W&B renders the entire report in the browser."""

_MAX_TITLE_CHARS = 128
"""Maximum length of a title in wandb-workspaces 0.4."""


@dataclass(frozen=True)
class WandbProject:
    """A project at W&B."""

    entity: str
    """Team or user, empty for the account's default."""
    project: str

    def __str__(self) -> str:
        return f"{self.entity}/{self.project}" if self.entity else self.project


def _workspaces() -> ModuleType:
    """Return the module `wandb_workspaces.reports.v2`, or raise ConfigError if it is missing."""
    # Disables W&B's telemetry, which waits 10 s for an unreachable host.
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    try:
        with warnings.catch_warnings():
            # wandb-workspaces 0.4 uses deprecated names of pydantic.
            warnings.simplefilter("ignore", DeprecationWarning)
            import wandb_workspaces.reports.v2 as reports
    except ModuleNotFoundError:
        why, fix = "needs the package wandb-workspaces", Fix(remark='pip install "eke[report]"')
        raise ConfigError(Problem("--wandb", "", why, fix, "package_missing")) from None
    return reports


def _recorded(comparison: Comparison) -> list[tuple[Entry, Record]]:
    """Return the compared runs with a record, in the report's order."""
    entries = [entry for row in comparison.rows for entry in row.variant.entries]
    return [(entry, entry.record) for entry in entries if entry.record is not None]


def find_project(comparison: Comparison, project: str = "", entity: str = "") -> WandbProject:
    """Return the project of the runs, unless given. Raise ConfigError if there are several."""
    settings = [table(record.config, "tracker") for _, record in _recorded(comparison)]
    return WandbProject(
        entity or _only("entity", settings),
        project or _only("project", settings) or schema.Tracker.project,
    )


def _only(key: str, settings: list[dict[str, Any]]) -> str:
    found = list(dict.fromkeys(str(each.get(key) or "") for each in settings))
    if len(found) > 1:
        names = ", ".join(name or "the account's default" for name in found)
        why = f"differs between runs: {names}"
        fix = Fix(remark=f"eke report ... --{key} {next(filter(None, found))}")
        raise ConfigError(Problem(f"tracker.{key}", "", why, fix, "ambiguous_tracker"))
    return found[0] if found else ""


def find_filter(comparison: Comparison) -> tuple[str, list[str]] | None:
    """Return W&B's filter key for the runs, `Group` or `ID`, and the names. None without runs.

    Groups, if W&B has the runs' sweeps as groups, include later runs of a sweep. Other runs are
    filtered by id: single runs, and cells with the record of an earlier sweep.
    """
    found = _recorded(comparison)
    if not found:
        return None
    sweeps = list(dict.fromkeys(entry.sweep for entry, _ in found))
    is_grouped = all(e.sweep == table(r.config, "tracker").get("group") for e, r in found)
    if is_grouped and all(map(_PLAIN.fullmatch, sweeps)):
        return "Group", sweeps
    ids = dict.fromkeys(
        tracker_id(entry.folder.name if entry.folder else record.run_id, record.run_id)
        for entry, record in found
    )
    return "ID", [each for each in ids if _PLAIN.fullmatch(each)]


def _factor_paths(comparison: Comparison) -> list[str]:
    """Return the paths in W&B's config of the factors that differ between runs.

    For example `precision.value` and `cfg.value.train.steps`: W&B wraps top-level keys in `value`.
    """
    options = {group for _, record in _recorded(comparison) for group in record.choices}
    known = {key for row in comparison.rows if row.variant.machine for key in row.variant.settings}
    # Options have the names of eke.results.trackers.wandb.make_config.
    named = {key: f"{key.replace('.', '_')}.value" for key in options}
    return [named.get(key, f"cfg.value.{key}") for key in comparison.factors if key in known]


def _panels(library: ModuleType) -> list[Any]:
    """Return a chart of speed and memory, and charts of losses, in W&B's grid of 24 columns."""

    def at(row: int, column: int = 0, width: int = 12) -> Any:
        return library.Layout(x=column * 12, y=row * 8, w=width, h=8)

    def lines(title: str, x: str, y: str, row: int, column: int) -> Any:
        return library.LinePlot(
            title=title, x=x, y=[y], layout=at(row, column),
            # Mean, minimum and maximum over the runs of a group. W&B's default is 10 runs.
            groupby_aggfunc="mean", groupby_rangefunc="minmax", max_runs_to_show=100,
        )  # fmt: skip

    return [
        library.ScatterPlot(
            title="samples/s over peak memory, GiB",
            x=library.SummaryMetric(PEAK_GIB),
            y=library.SummaryMetric(SAMPLES_PER_S),
            layout=at(0, width=24),
        ),
        lines("eval loss over steps", metrics.STEP, metrics.EVAL_LOSS, 1, 0),
        lines("train loss over steps", metrics.STEP, metrics.LOSS, 1, 1),
        lines("train loss over tokens", TOTAL_TOKENS, metrics.LOSS, 2, 0),
        lines("train loss over seconds of training", TIME, metrics.LOSS, 2, 1),
    ]


def specification(comparison: Comparison, place: WandbProject, is_online: bool = False) -> Any:
    """Build the report for wandb-workspaces. Raise ConfigError if that is not installed.

    It has the contents of the other formats and belongs to the project `place`. With `is_online`
    the run set also names the project, which requests its id from the server.
    """
    library = _workspaces()
    blocks = []
    if found := find_filter(comparison):
        key, names = found
        which = f"group {', '.join(names)}" if key == "Group" else f"{len(names)} runs by their ids"
        live = f"Live: {escape(which)} in project {escape(place.project)}. "
        live += "The text below is of the time of writing."
        chosen = f"== {names[0]!r}" if len(names) == 1 else f"in {names!r}"
        factors = _factor_paths(comparison)
        # Compared runs, fastest first, grouped and colored by differing factors.
        run_set = library.Runset(
            **(asdict(place) if is_online else {}),
            name="compared runs",
            filters=f"Metric({key!r}) {chosen}",
            groupby=[f"config.{path}" for path in factors if len(factors) <= MAX_FACTORS],
            order=[library.OrderBy(library.SummaryMetric(SAMPLES_PER_S), ascending=False)],
            pinned_columns=[*(f"config:{path}" for path in factors),
                            f"summary:{SAMPLES_PER_S}", f"summary:{PEAK_GIB}"],
        )  # fmt: skip
        grid = library.PanelGrid(runsets=[run_set], panels=_panels(library))
        blocks += [grid, library.MarkdownBlock(live)]
    first, *others = map(escape, verdict_lines(comparison))
    rows = main_table(comparison, MAX_TABLE_ROWS, max_chars=300) if comparison.rows else []
    notes = "\n".join(f"- {escape(note)}" for note in comparison.notes)
    texts = [f"**{first}**", *others, escape(count_outcomes(comparison)), "\n".join(rows), notes]
    blocks.append(library.MarkdownBlock("\n\n".join(filter(None, texts))))
    titles = comparison.sweeps or tuple(Path(folder).name for folder in comparison.folders)
    return library.Report(
        # None would cause a request to the server.
        entity=place.entity,
        project=place.project,
        title=cut(printable_line(f"eke: {', '.join(titles) or 'runs'}"), _MAX_TITLE_CHARS),
        description="made by eke report",
        blocks=blocks,
        width="fluid",
    )


def dump(report: Any) -> str:
    """Return the JSON that `save` sends. `spec` is the parsed string of its mutation `upsertView`.

    wandb-workspaces 0.4.13 has no public method for it.
    """
    model = report._to_model()
    content = {
        "displayName": model.display_name,
        "description": model.description,
        "entityName": model.project.entity_name,
        "projectName": model.project.name,
        "type": "runs",
        "spec": json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True)),
    }
    return json.dumps(content, indent=1) + "\n"


def publish(comparison: Comparison, place: WandbProject, file: Path) -> tuple[str, bool, int]:
    """Save the report, and add its id to the published reports in `file`.

    An empty entity of `place` is the account's default. Returns the URL, whether it is new, and the
    number of runs that the server may lack. Raises as `account.session` and `account.bounded`,
    ConfigError if the server has no such project, and OSError if `file` cannot be written.
    """
    names = ("server", "entity", "project", "id", "url")
    try:  # stored with the other files, so that they can be updated
        reports = [{name: each[name] for name in names} for each in read_json(file)["published"]]
    except (OSError, ValueError, TypeError, KeyError):  # missing or invalid
        reports = []
    with account.session() as (user, _):
        place = replace(place, entity=place.entity or user.entity)
        if not place.entity:
            why, fix = "W&B's server names no default entity", Fix(remark="--entity NAME")
            raise ConfigError(Problem("--entity", "", why, fix, "missing_value"))
        where = {"server": user.server, "entity": place.entity, "project": place.project}
        known = [each for each in reports if where.items() <= each.items()]
        known_id = next((str(each["id"]) for each in known), "")
        # Four requests, for which W&B allows 19 s each.
        answer = account.bounded(lambda: _save(comparison, place, known_id), 60.0)
    if answer is None:
        why, create = "does not exist, or this account has no access", "eke sync RUNS creates it"
        fix = Fix(remark=f"--project NAME or --entity NAME. {create}")
        raise ConfigError(Problem("--project", str(place), why, fix, "unknown_project"))
    report_id, url = answer
    kept = [each for each in reports if each not in known]
    kept.append({**where, "id": report_id, "url": url})
    write_json(file, {"schema_version": 1, "published": kept})
    return url, report_id != known_id, _count_missing(comparison, tuple(where.values()))


def _count_missing(comparison: Comparison, where: tuple[str, ...]) -> int:
    """Count the runs without a receipt of `eke sync` that did not run online."""
    count = 0
    for entry, record in _recorded(comparison):
        settings = table(record.config, "tracker")
        found = tuple(settings.get(key) for key in ("mode", "option", "project"))
        if found != (TrackerMode.online.value, "wandb", where[2]):
            receipts = read_receipts(RunPaths(entry.folder)) if entry.folder else []
            count += not any(receipt.place == where for receipt in receipts)
    return count


def _save(comparison: Comparison, place: WandbProject, known_id: str) -> tuple[str, str] | None:
    """Save the report, and return its id and URL, None if there is no such project."""
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
