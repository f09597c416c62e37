"""All that W&B's transaction log holds, for tests of what eke writes there."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eke.results.trackers.wandb import HEADER_BYTES, records


@dataclass
class WandbFile:
    """What could be read of one file."""

    run_id: str = ""
    group: str = ""
    resumed: bool = False
    """Written by a later attempt, which the server is asked to append."""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    step_metric: str = ""
    """The metric that is every chart's x axis."""
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    """None for a run that was killed."""
    safe_length: int = 0
    """Bytes up to the end of the last complete record; `wandb sync` refuses what lies behind."""
    length: int = 0
    """Bytes of the file."""

    @property
    def is_torn(self) -> bool:
        """Whether the file ends inside a record."""
        return self.safe_length < self.length


def read_wandb_file(path: str | Path) -> WandbFile:
    """Everything up to the first torn or damaged record.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no file of W&B's.
    """
    data = Path(path).read_bytes()
    result = WandbFile(length=len(data), safe_length=min(len(data), HEADER_BYTES))
    for end, record in records(data):
        result.safe_length = end
        _add(result, record)
    return result


def _add(result: WandbFile, record: Any) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        result.run_id, result.group = record.run.run_id, record.run.run_group
        result.tags = list(record.run.tags)
        result.resumed = result.resumed or record.run.resume
        _update(result.config, record.run.config.update)
    elif kind == "config":
        _update(result.config, record.config.update)
    elif kind == "history":
        row: dict[str, Any] = {}
        _update(row, record.history.item)
        result.rows.append(row)
    elif kind == "summary":
        _update(result.summary, record.summary.update)
    elif kind == "metric" and record.metric.glob_name == "*":
        result.step_metric = record.metric.step_metric
    elif kind == "exit":
        result.exit_code = record.exit.exit_code


def _update(tree: dict[str, Any], items: Iterable[Any]) -> None:
    """Set items, each under its key or its path of keys."""
    for item in items:
        *parents, name = list(item.nested_key) or [item.key]
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[name] = json.loads(item.value_json)
