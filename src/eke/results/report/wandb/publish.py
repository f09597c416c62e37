"""Publish a report at W&B, or update the published one. Tested with wandb 0.31."""

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError
from eke.common.files import read_json, write_json
from eke.common.paths import RunPaths
from eke.config.schema import TrackerMode
from eke.results.report.compare import Comparison
from eke.results.report.wandb.specification import (
    WandbProject,
    recorded,
    specification,
    tracker_settings,
    workspaces,
)
from eke.results.trackers.sync import account
from eke.results.trackers.sync.account import read_receipts

SAVE_S = 60.0
"""Time limit without the login: four requests, for which W&B allows 19 s each."""

FILE_VERSION = 1


@dataclass(frozen=True)
class PublishedReport:
    """A published report, stored with the other files so that it can be updated."""

    server: str
    entity: str
    project: str
    id: str
    url: str

    @property
    def where(self) -> tuple[str, str, str]:
        """Server, entity, project."""
        return (self.server, self.entity, self.project)


@dataclass(frozen=True)
class Saved:
    """Result of publishing a report."""

    published: PublishedReport
    is_new: bool
    missing: int
    """Runs that eke neither synced nor logged there."""


def publish(
    comparison: Comparison, place: WandbProject, file: Path, repeats: bool = False
) -> Saved:
    """Save the report, and store its id in `file`.

    Args:
        comparison: what is reported.
        place: its project; an empty entity is the account's default.
        file: where earlier reports of this comparison are remembered.
        repeats: list every run, too.

    Raises:
        ConfigError: wandb-workspaces or an API key is missing, the server refuses the key, or it
            knows no such project.
        NoAnswer: the server does not answer.
        Refusal: it cannot be reached, or does not take the report.
        OSError: `file` cannot be written.
    """
    workspaces()  # fails before the login if it is missing
    with tempfile.TemporaryDirectory(prefix="eke-report-", ignore_cleanup_errors=True) as scratch:
        account.configure_wandb(Path(scratch))
        try:
            user = account.log_in(account.ANSWER_S)
            place = replace(place, entity=place.entity or user.entity)
            if not place.entity:
                raise ConfigError("W&B's server names no default entity -> --entity NAME")
            others = read_published_reports(file)
            known = next((p for p in others if p.where == _where(user.server, place)), None)
            known_id = known.id if known else ""
            answer = account.bounded(lambda: _save(comparison, place, repeats, known_id), SAVE_S)
        finally:
            account.give_up_core()
    if answer is None:
        raise ConfigError(
            f"project {place}: the server knows none of this name, or not for this account\n"
            "  -> eke sync RUNS   (sends the runs, and makes it), or --project NAME, --entity NAME"
        )
    report_id, url = answer
    published = PublishedReport(*_where(user.server, place), report_id, url)
    kept = [p for p in others if p.where != published.where]
    content = [asdict(each) for each in (*kept, published)]
    write_json(file, {"schema_version": FILE_VERSION, "published": content})
    missing = count_missing(comparison, published.where)
    return Saved(published, report_id != known_id, missing)


def read_published_reports(file: Path) -> list[PublishedReport]:
    """Reports published before; none if the file is missing or invalid."""
    try:
        return [PublishedReport(**each) for each in read_json(file)["published"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def count_missing(comparison: Comparison, where: tuple[str, str, str]) -> int:
    """Count runs that the server may lack: no receipt of `eke sync`, and not run online."""
    count = 0
    for entry, record in recorded(comparison):
        settings = tracker_settings(record)
        is_online = settings.get("mode") == TrackerMode.online.value
        if is_online and settings.get("option") == "wandb" and settings.get("project") == where[2]:
            continue
        receipts = read_receipts(RunPaths(entry.folder)) if entry.folder else []
        count += not any(receipt.place == where for receipt in receipts)
    return count


def _where(server: str, place: WandbProject) -> tuple[str, str, str]:
    return (server, place.entity, place.project)


def _save(
    comparison: Comparison, place: WandbProject, repeats: bool, known_id: str
) -> tuple[str, str] | None:
    """Id and address of the saved report; None when there is no such project.

    `Report.save` would create the project, also for a misspelled name.
    """
    import wandb
    from wandb_workspaces._graphql import execute_graphql
    from wandb_workspaces.reports.v2 import gql

    api = wandb.Api(timeout=int(account.ANSWER_S))
    names = {"entityName": place.entity, "projectName": place.project}
    if not execute_graphql(api, gql.projectInternalId, names).get("project"):
        return None
    report = specification(comparison, place, repeats, is_online=True)
    report.id = known_id if known_id and _is_there(api, known_id) else ""
    report.save()
    return str(report.id), str(report.url)


def _is_there(api: Any, report_id: str) -> bool:
    """Whether a published report still exists."""
    from wandb_workspaces._graphql import execute_graphql
    from wandb_workspaces.reports.v2 import gql

    try:
        return bool(execute_graphql(api, gql.view_report, {"reportId": report_id}).get("view"))
    except Exception as error:  # several classes for an unknown id
        if "not found" in str(error).lower():
            return False
        raise
