"""Tracker interface, and the run data that trackers receive from the worker or `eke sync`."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eke.common.masking import masked
from eke.config import schema
from eke.config.schema import PRIVATE_GROUPS
from eke.plan.record import Record

Value = float | int | str
Row = Mapping[str, Value]
"""One line of metrics.jsonl: `train/global_step`, `train/loss`, `eval/loss`, `attempt`, ..."""


@dataclass(frozen=True)
class TrackedRun:
    """Run data for trackers; built by the worker on rank 0."""

    run_id: str
    """16 hex digits; also the tracker's id, so that attempts continue one run."""
    name: str
    """The overrides: `precision=bf16 optimizer=adafactor`."""
    tags: tuple[str, ...]
    notes: str
    """The exact command line."""
    factors: Mapping[str, str]
    """Option of each group: top-level scalars of the tracker's config, for grouping."""
    config: Mapping[str, Any]
    """The resolved configuration, stored under `cfg` to avoid name collisions."""
    directory: Path
    """Run folder; the tracker writes only below it."""
    attempt: int
    """Number of this attempt, from 0; later ones continue the run."""
    settings: schema.Tracker


@dataclass(frozen=True)
class Untracked:
    """Tracker that does nothing."""

    problem: str = ""
    """Reason that a requested tracker is missing."""

    def log(self, rows: Sequence[Row]) -> None:
        """Nothing."""

    def summary(self, values: Row) -> None:
        """Nothing."""

    def finish(self, exit_code: int) -> None:
        """Nothing."""


PRIVATE = re.compile(rf"\+*({'|'.join(PRIVATE_GROUPS)})[.=]")
SPEEDS = ("samples_per_s", "tokens_per_s", "mfu_frac", "steady_step_s")


def shown_of(
    overrides: Iterable[str],
    command: Iterable[str],
    factors: Mapping[str, str],
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Overrides, command and configuration for trackers, as fields of a TrackedRun.

    Secrets are masked, and groups with private shell lines are omitted.
    """
    typed, whole = ([w for w in words if not PRIVATE.match(w)] for words in (overrides, command))
    return {
        "name": " ".join(masked(typed)) or "defaults",
        "notes": shlex.join(masked(whole)),
        "factors": {key: option for key, option in factors.items() if key not in PRIVATE_GROUPS},
        "config": masked({k: value for k, value in config.items() if k not in PRIVATE_GROUPS}),
    }


def tracker_id(folder: str, run_id: str) -> str:
    """Id in trackers: the folder's name, as duplicates (`-2`) share a run id; if not renamed."""
    return folder if re.fullmatch(rf"{re.escape(run_id)}(-\d+)?", folder) else run_id


def summary_values(record: Record) -> Mapping[str, Value]:
    """Main numbers of a record as flat values; those not measured are absent.

    Speeds of a run on a shared device are absent, as in reports.
    """
    memory = record.memory.measured
    step = record.timing.steady_step_s
    values: dict[str, Value | None] = {
        "outcome": record.outcome,
        "samples_per_s": record.throughput.samples_per_s,
        "tokens_per_s": record.throughput.tokens_per_s,
        "mfu_frac": record.throughput.mfu_frac,
        "steady_step_s": step.median if step else None,
        "peak_allocated_bytes": memory.peak_allocated_bytes if memory else None,
        "peak_reserved_bytes": memory.peak_reserved_bytes if memory else None,
        "eval_start": record.loss.eval_start,
        "eval_final": record.loss.eval_final,
        **{f"eval_{name}": value for name, value in record.metrics.items()},
        "python": record.environment.get("python"),
    }
    hidden = SPEEDS if record.shared_device else ()
    return {key: value for key, value in values.items() if value is not None and key not in hidden}
