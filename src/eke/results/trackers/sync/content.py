"""What is sent of a run: the truth that its folder holds."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eke.common.files import read_bytes
from eke.common.paths import RunPaths
from eke.config import schema
from eke.plan.planner import outline_record, read_plan
from eke.plan.record import RECORD_LIMIT, Outcome, Record, metrics, read_attempts, read_record
from eke.results.trackers.describe import shown_of, summary_values, tracker_id
from eke.results.trackers.resume_offset import deduplicate
from eke.results.trackers.tracker import TrackedRun, Value


@dataclass(frozen=True)
class Content:
    """One run, ready to be sent."""

    run: TrackedRun
    rows: list[metrics.Row]
    """One per step and kind, the highest attempt's."""
    summary: Mapping[str, Value]
    exit_code: int
    digest: str
    """Of the files it was read from."""
    note: str = ""
    """What could not be read."""

    @property
    def steps(self) -> list[int]:
        """Distinct steps: rows as W&B counts them."""
        return sorted({int(row[metrics.STEP]) for row in self.rows})


def digest_of(paths: RunPaths) -> str:
    """SHA-256 of what a run's content is read from.

    Raises:
        OSError: a file cannot be read.
    """
    state = hashlib.sha256()
    limits = {paths.record: RECORD_LIMIT, paths.metrics: metrics.METRICS_LIMIT}
    for path, limit in limits.items():
        try:
            data = read_bytes(path, limit)
        except FileNotFoundError:
            data = b""
        state.update(f"{len(data)} ".encode())
        state.update(data)
    return state.hexdigest()


def read_content(paths: RunPaths, project: str | None, entity: str | None) -> Content:
    """Everything of a run that W&B is to have.

    Args:
        paths: the run folder.
        project: instead of the configuration's; None keeps it.
        entity: the same for the team.

    Raises:
        EkeError: the record or the plan cannot be read.
        OSError: a file cannot be read.
    """
    digest = digest_of(paths)
    rows, unreadable = metrics.read_rows(paths.metrics)
    record = read_record(paths) or _outline(paths, rows)
    settings = record.config.get("tracker")
    settings = settings if isinstance(settings, dict) else {}
    device = str(record.plan.get("device", {}).get("name", ""))
    run = TrackedRun(
        run_id=tracker_id(paths.folder.name, record.run_id),
        group=settings.get("group"),
        tags=(device,),
        directory=paths.folder,
        attempt=0,  # it is sent as one piece, so that sending it again changes nothing
        settings=schema.Tracker(
            option=str(settings.get("option", "wandb")),
            mode=schema.TrackerMode.online,
            project=project or str(settings.get("project") or "eke"),
            entity=entity or settings.get("entity"),
        ),
        **shown_of(
            record.overrides,
            record.command,
            {**record.choices, **({"device": device} if device else {})},
            record.config,
        ),
    )
    note = f"{unreadable} unreadable lines left out" if unreadable else ""
    kept = deduplicate(rows)
    return Content(run, kept, summary_values(record), record.exit_code, digest, note)


def _outline(paths: RunPaths, rows: list[metrics.Row]) -> Record:
    """The record of a run whose worker and supervisor were killed before they wrote one."""
    plan = read_plan(paths)
    attempt: Any = max(len(read_attempts(paths)) - 1, 0)
    return outline_record(plan, rows, attempt, Outcome.crashed, None)
