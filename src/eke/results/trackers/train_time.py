"""Seconds of training steps up to each row: an axis on which runs can be compared by time.

W&B's own clocks run while a run is uploaded, or while it waits between two attempts.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from eke.plan.record import metrics
from eke.results.trackers.resume_offset import deduplicate
from eke.results.trackers.tracker import Row

TIME = "train/time_s"
"""Sum of `train/step_time_s` over all steps so far, those of earlier attempts included."""


class TrainTime:
    """Adds the time to the rows of an attempt, in the order in which they come.

    Args:
        metrics_file: holds the rows of earlier attempts.
        attempt: number of this one.
    """

    def __init__(self, metrics_file: Path, attempt: int) -> None:
        self._metrics_file = metrics_file
        self._attempt = attempt
        self._total: float | None = None

    def add(self, rows: Sequence[Row]) -> list[Row]:
        """The rows, those of training steps with their time.

        Raises:
            OSError: metrics.jsonl cannot be read.
        """
        return [self._with_time(row) for row in rows]

    def _with_time(self, row: Row) -> Row:
        if self._total is None:
            # An evaluation comes after its step, which an earlier attempt may have done.
            done = metrics.STEP_TIME not in row
            self._total = self._before(int(row[metrics.STEP]) + done)
        if metrics.STEP_TIME not in row:
            return row  # an evaluation joins the row of its step
        self._total += _seconds(row)
        return {**row, TIME: self._total}

    def _before(self, first_step: int) -> float:
        """Seconds of the steps that earlier attempts did before the first one here."""
        if not self._attempt:
            return 0.0
        rows, _ = metrics.read_rows(self._metrics_file)
        earlier = deduplicate(row for row in rows if row.get(metrics.ATTEMPT, 0) < self._attempt)
        return sum(_seconds(row) for row in earlier if int(row[metrics.STEP]) < first_step)


def _seconds(row: Mapping[str, object]) -> float:
    value = row.get(metrics.STEP_TIME)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
