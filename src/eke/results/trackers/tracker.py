"""Data of a run that trackers receive from the worker or `eke sync`."""

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eke.common.files import read_json
from eke.common.masking import masked
from eke.common.paths import RunPaths, SweepPaths
from eke.common.text import GIB
from eke.config import schema
from eke.config.schema import PRIVATE_GROUPS
from eke.plan.record import Record, metrics, table

Value = float | int | str
Row = Mapping[str, Value]
"""One line of metrics.jsonl: `train/global_step`, `train/loss`, `eval/loss`, `attempt`, ..."""


@dataclass(frozen=True)
class TrackedRun:
    """Data of a run for trackers, built by the worker on rank 0."""

    run_id: str
    """16 hex digits. Also the tracker's id, so that attempts continue one run."""
    name: str
    """Row and overrides that differ in the sweep: `precision=bf16 optimizer=adafactor`."""
    tags: tuple[str, ...]
    notes: str
    """The exact command line."""
    factors: Mapping[str, Value]
    """Scalars of the tracker's config, for grouping: options, `told`, commit and device."""
    config: Mapping[str, Any]
    """The resolved configuration, stored under `cfg` to avoid name collisions."""
    directory: Path
    """Run folder. The tracker writes only below it."""
    attempt: int
    """Number of the attempt, from 0. Later attempts continue the run."""
    settings: schema.Tracker
    told: Mapping[str, Value] = field(default_factory=dict)
    """Keys that differ in the sweep, with row, seed and repeat."""


@dataclass(frozen=True)
class Untracked:
    """Tracker without effect."""

    problem: str = ""
    """Reason that a requested tracker is missing."""

    def log(self, rows: Sequence[Row]) -> None:
        """Ignore rows."""

    def summary(self, values: Row) -> None:
        """Ignore values."""

    def finish(self, exit_code: int) -> None:
        """Return immediately."""


def tracked_run(
    record: Record, paths: RunPaths, attempt: int, settings: schema.Tracker
) -> TrackedRun:
    """Return the data for trackers of a record, without secrets and private groups."""
    private = re.compile(rf"\+*({'|'.join(PRIVATE_GROUPS)})[.=]")
    typed, whole = (
        masked([word for word in words if not private.match(word)])
        for words in (record.overrides, record.command)
    )
    shared, row = set[str](), ""
    # The sweep's file may be missing or damaged.
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration):
        cells = read_json(SweepPaths(paths.folder.parent / str(settings.group)).sweep)["cells"]
        row = next(str(cell["row"]) for cell in cells if cell["run_id"] == record.run_id)
        if len(cells) > 1:
            shared = set.intersection(*(set(cell["overrides"]) for cell in cells))
    own = [text for text in typed if text not in shared]
    told: dict[str, Value] = {}
    for key, value in (text.lstrip("+").partition("=")[::2] for text in own):
        node: Any = record.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        told[key] = node if isinstance(node, int | float) else value
    told |= {key: record.config[key] for key in ("seed", "repeat") if key in record.config}
    told |= {"row": row} if row else {}
    device = str(table(record.plan, "device").get("name", ""))
    facts = {"commit": table(record.environment, "git").get("commit"), "device": device}
    options = {key: each for key, each in record.choices.items() if key not in PRIVATE_GROUPS}
    return TrackedRun(
        run_id=tracker_id(paths.folder.name, record.run_id),
        name=": ".join(filter(None, (row, " ".join(own)))) or "defaults",
        tags=(device,),
        notes=shlex.join(whole),
        factors={**options, **told, **{key: str(fact) for key, fact in facts.items() if fact}},
        told=told,
        config=masked({k: v for k, v in record.config.items() if k not in PRIVATE_GROUPS}),
        directory=paths.folder,
        attempt=attempt,
        settings=settings,
    )


def tracker_id(folder: str, run_id: str) -> str:
    """Return the id in trackers: the folder's name (duplicates: `-2`), `run_id` if renamed."""
    return folder if re.fullmatch(rf"{re.escape(run_id)}(-\d+)?", folder) else run_id


def summary_values(record: Record, rows: Sequence[metrics.Row] = ()) -> Mapping[str, Value]:
    """Return the measured numbers of a record and its rows. Shared devices have no speeds."""
    memory, step = record.memory.measured, record.timing.steady_step_s
    peak = memory.peak_allocated_bytes if memory else None
    evaluations = [row[metrics.EVAL_LOSS] for row in metrics.latest(rows, metrics.EVAL_LOSS)]
    speeds: dict[str, Value | None] = {
        "samples_per_s": record.throughput.samples_per_s,
        "tokens_per_s": record.throughput.tokens_per_s,
        "mfu_frac": record.throughput.mfu_frac,
        "steady_step_s": step.median if step else None,
    }
    values: dict[str, Value | None] = {
        "outcome": record.outcome,
        **({} if record.shared_device else speeds),
        "peak_allocated_bytes": peak,
        "peak_allocated_gib": None if peak is None else peak / GIB,
        "peak_reserved_bytes": memory.peak_reserved_bytes if memory else None,
        "eval_start": record.loss.eval_start,
        "eval_final": record.loss.eval_final,
        "eval_best": min(evaluations, default=None),
        "tokens": sum(row[metrics.TOKENS] for row in metrics.latest(rows, metrics.TOKENS)) or None,
        **{f"eval_{name}": value for name, value in record.metrics.items()},
        "python": record.environment.get("python"),
    }
    return {key: value for key, value in values.items() if value is not None}
