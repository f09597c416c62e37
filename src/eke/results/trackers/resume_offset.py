"""What a later attempt still owes a mirror, and what the mirror has already.

A resumed run repeats the steps since its checkpoint, bit for bit; and rows of the attempt before
may have been lost on their way. So a mirror is asked how far it came: older rows are sent again,
repeated ones are left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eke.plan.record import metrics
from eke.results.trackers.tracker import Row

TRAIN, EVAL = "train", "eval"


def kind_of(row: Mapping[str, object]) -> str:
    """Whether a row tells of a training step or of an evaluation: a step can have both."""
    return EVAL if metrics.EVAL_LOSS in row else TRAIN


def deduplicate(rows: Iterable[metrics.Row]) -> list[metrics.Row]:
    """One row per step and kind, the highest attempt's; by step, training before evaluation."""
    best: dict[tuple[int, bool], metrics.Row] = {}
    for row in rows:
        if not isinstance(row.get(metrics.STEP), int):
            continue
        key = (int(row[metrics.STEP]), kind_of(row) == EVAL)
        if key not in best or row.get(metrics.ATTEMPT, 0) >= best[key].get(metrics.ATTEMPT, 0):
            best[key] = row
    return [best[key] for key in sorted(best)]


@dataclass
class CatchUp:
    """Turns the rows of an attempt into the rows that a mirror lacks."""

    metrics_file: Path
    attempt: int
    seen: dict[str, int] = field(default_factory=dict)
    """Kind of row -> last step that the mirror has of it; absent: none."""
    _caught_up: bool = False

    def missing(self, rows: Sequence[Row]) -> list[Row]:
        """The rows to send now: older ones that never arrived, then those of `rows` that are new.

        Raises:
            OSError: metrics.jsonl cannot be read.
        """
        found = [row for row in rows if self._is_new(row)]
        if rows and not self._caught_up:
            self._caught_up = True
            found = [*self._older(int(rows[0][metrics.STEP])), *found]
        for row in found:
            self.seen[kind_of(row)] = int(row[metrics.STEP])
        return found

    def _is_new(self, row: Mapping[str, float | int | str]) -> bool:
        return int(row[metrics.STEP]) > self.seen.get(kind_of(row), -1)

    def _older(self, first_step: int) -> list[metrics.Row]:
        """Rows of earlier attempts, before the first step of this one, that the mirror lacks."""
        if not self.attempt or self.seen.get(TRAIN, -1) >= first_step - 1:
            return []
        rows, _ = metrics.read_rows(self.metrics_file)
        earlier = deduplicate(row for row in rows if row.get(metrics.ATTEMPT, 0) < self.attempt)
        return [row for row in earlier if row[metrics.STEP] < first_step and self._is_new(row)]
