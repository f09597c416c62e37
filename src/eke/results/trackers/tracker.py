"""What a tracker is told about a run, and what may be asked of it.

What a tracker is told about a run: by its worker, and by `eke sync` afterwards.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eke.common.masking import masked
from eke.config import schema
from eke.config.schema import PRIVATE_GROUPS
from eke.plan.record import Record

Value = float | int | str
Row = Mapping[str, Value]
"""One line of metrics.jsonl: `train/global_step`, `train/loss`, `eval/loss`, `attempt`, ..."""


@dataclass(frozen=True)
class TrackedRun:
    """Everything a tracker may know about a run; filled by the worker, on rank 0 only."""

    run_id: str
    """16 hex digits; the tracker's own id, so that attempts of one run meet again."""
    name: str
    """What was typed, in short: `precision=bf16 optimizer=adafactor`."""
    group: str | None
    """Id of the sweep, None outside a sweep. `tracker.group` goes before it."""
    tags: tuple[str, ...]
    notes: str
    """The exact command line."""
    factors: Mapping[str, str]
    """Option chosen in each group: scalars at the top of the tracker's config, to group by."""
    config: Mapping[str, Any]
    """The resolved configuration; lies under `cfg`, where its names meet no other."""
    directory: Path
    """Run folder; the tracker writes below it and nowhere else."""
    attempt: int
    """Number of this attempt, from 0; later ones continue the run instead of starting it."""
    settings: schema.Tracker


class Tracker(Protocol):
    """Receives what a run measures. No method raises or waits longer than its stated bound."""

    def log(self, rows: Sequence[Row]) -> None:
        """Mirror rows of metrics.jsonl; call it outside measured steps."""
        ...

    def summary(self, values: Row) -> None:
        """Set values of the whole run: final loss, throughput, peak memory."""
        ...

    def finish(self, exit_code: int) -> None:
        """Hand over what is left and close the run; waits a bounded time."""
        ...

    @property
    def problem(self) -> str:
        """Why the mirror is incomplete, in one line; empty while it is whole."""
        ...


@dataclass(frozen=True)
class Untracked:
    """A tracker that mirrors nothing."""

    problem: str = ""
    """Why nothing is mirrored, when something should have been."""

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
    """What a tracker is told of how a run was asked for, as fields of a TrackedRun.

    No secret, and nothing of groups with lines of shell, which are for this user alone.
    """
    typed, whole = ([w for w in words if not PRIVATE.match(w)] for words in (overrides, command))
    return {
        "name": " ".join(masked(typed)) or "defaults",
        "notes": shlex.join(masked(whole)),
        "factors": {key: option for key, option in factors.items() if key not in PRIVATE_GROUPS},
        "config": masked({k: value for k, value in config.items() if k not in PRIVATE_GROUPS}),
    }


def tracker_id(folder: str, run_id: str) -> str:
    """A run's id in trackers: its folder's name, for runs beside another (`-2`) have one identity.

    A folder that was renamed says nothing; then it is the identity.
    """
    return folder if re.fullmatch(rf"{re.escape(run_id)}(-\d+)?", folder) else run_id


def summary_values(record: Record) -> Mapping[str, Value]:
    """The record's main numbers as flat values; what was not measured is left out.

    Speeds of a run that shared its device are absent, as in reports: they measure the neighbour.
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
        "python": record.environment.get("python"),
    }
    hidden = SPEEDS if record.shared_device else ()
    return {key: value for key, value in values.items() if value is not None and key not in hidden}
