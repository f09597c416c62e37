"""What a tracker is told about a run, and what may be asked of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eke.config import schema

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
