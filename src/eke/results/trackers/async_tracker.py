"""Asynchronous tracker: one thread, a bounded queue, and a circuit breaker around a mirror.

Training must not stop or wait if a server hangs or a helper process dies: SLURM's SIGTERM goes to
every process of a job, wandb-core dies of it, and the next `log` raises.

A resumed run repeats the steps since its checkpoint, bit for bit, and rows of the previous attempt
may be lost. So the mirror's last step is read, older rows are sent again, repeated rows skipped.
"""

import logging
import math
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from eke.common.masking import mask
from eke.common.text import format_number
from eke.plan.record import metrics
from eke.results.trackers.tracker import Row, Value

_log = logging.getLogger(__name__)


class TrackerClient(Protocol):
    """Tracker client driven by a guard. Methods may raise, and all but `prepare` may hang."""

    def prepare(self) -> None:
        """Do local work on the caller's thread: imports, environment, helper processes."""

    def open(self) -> None:
        """Start the run. By default, the first row starts it."""
        return

    def log(self, rows: Sequence[Row]) -> None:
        """Hand over rows."""

    def summary(self, values: Row) -> None:
        """Hand over values of the entire run."""

    def close(self, exit_code: int) -> None:
        """Finish the run. Raise if data is missing."""

    def abandon(self) -> None:
        """Release resources after another method raised. By default, the worker's exit does."""
        return

    def kill(self) -> None:
        """Make a hanging method on another thread raise. By default, it continues to hang."""
        return


class MirrorError(Exception):
    """A problem found by a mirror, with a message for the user."""


class AsyncTracker:
    """Tracker around a mirror. No method raises or waits longer than its limit.

    One daemon thread opens and feeds the mirror. The first exception switches the mirror off, with
    one logged warning. `problem` counts the missing rows and names the command that sends them
    (`remedy`).
    """

    patience_s = 0.02
    """Seconds that `log` waits for its rows, to keep the work out of the next measured step.

    A mirror that exceeds the limit is not waited for until it has caught up.
    """
    max_rows = 10_000
    """Largest number of waiting rows, 10 MB at 1 kB a row. Further rows are dropped and counted."""

    def __init__(self, mirror: TrackerClient, finish_s: float, remedy: str = "") -> None:
        self._mirror, self._finish_s = mirror, finish_s
        self._remedy = f" -> {remedy}" if remedy else ""
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._reason = ""
        self._pending = self._lost = 0
        self._late = self._finishing = False
        self._ended = threading.Event()
        try:
            mirror.prepare()
        except Exception as error:
            self._stop(error)
            self._ended.set()
        else:
            threading.Thread(target=self._feed_mirror, name="eke-tracker", daemon=True).start()

    def log(self, rows: Sequence[Row]) -> None:
        """Queue rows, and give the mirror `patience_s` to take them."""
        batch = tuple(dict(row) for row in rows)
        with self._changed:
            is_full = self._pending + len(batch) > self.max_rows
            if self._reason or self._finishing or is_full:
                if is_full and not self._lost:
                    _log.warning("tracker: %d rows are waiting, new rows are dropped. "
                                 "metrics.jsonl has every row.", self._pending)  # fmt: skip
                self._lost += len(batch)
                return
            self._pending += len(batch)
            self._jobs.put((partial(self._mirror.log, batch), len(batch)))
            if not self._late:
                self._late = not self._changed.wait_for(
                    lambda: self._pending == 0 or bool(self._reason), self.patience_s
                )

    def summary(self, values: Row) -> None:
        """Queue values of the entire run."""
        with self._changed:
            if not (self._reason or self._finishing):
                self._jobs.put((partial(self._mirror.summary, dict(values)), 0))

    def finish(self, exit_code: int) -> None:
        """Close the mirror within `finish_s` + 1 seconds. A second call has no effect."""
        with self._changed:
            if self._finishing:
                return
            self._finishing = True
        self._jobs.put((partial(self._mirror.close, exit_code), 0))
        self._jobs.put(None)
        if not self._ended.wait(self._finish_s):
            self._stop(MirrorError(f"did not finish within {self._finish_s:g} s"))
            # Otherwise the interpreter's exit would wait for it.
            with suppress(Exception):
                self._mirror.kill()
            self._ended.wait(1.0)

    @property
    def problem(self) -> str:
        """Reason that the mirror is incomplete, or empty."""
        with self._changed:
            lost = f"{format_number(self._lost, 'row')} not mirrored" if self._lost else ""
            cause = "; ".join(filter(None, (self._reason, lost)))
            return f"{cause} (metrics.jsonl has every row){self._remedy}" if cause else ""

    def _feed_mirror(self) -> None:
        """Open the mirror and feed it until it is closed or raises."""
        try:
            self._mirror.open()
            for job, num_rows in iter(self._jobs.get, None):
                job()
                with self._changed:
                    if not self._reason:  # otherwise the rows count as lost
                        self._pending -= num_rows
                        self._late = self._late and self._pending > 0
                        self._changed.notify_all()
        except BaseException as error:  # sys.exit would also end the thread silently
            self._stop(error)
            with suppress(BaseException):  # `wandb.teardown` calls sys.exit if wandb-core died
                self._mirror.abandon()
        finally:
            self._ended.set()

    def _stop(self, error: BaseException) -> None:
        """Switch the mirror off. Only the first error counts."""
        with self._changed:
            if self._reason:
                return
            text = one_line(error)
            self._reason = text if isinstance(error, MirrorError) else f"stopped by {text}"
            self._lost += self._pending
            self._pending = 0
            self._changed.notify_all()
        _log.warning("tracker: %s; training goes on", self.problem)


def one_line(error: BaseException) -> str:
    """Return an exception as one line with masked secrets: `ValueError: text`."""
    text = " ".join(str(error).split())
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        if secret := os.environ.get(name):
            text = text.replace(secret, "***")
    names = [] if isinstance(error, MirrorError) else [type(error).__name__]
    return ": ".join(filter(None, [*names, mask(text)]))


TRAIN, EVAL = "train", "eval"


def _kind_of(row: Mapping[str, object]) -> str:
    """Return the kind of a row, TRAIN or EVAL. A step can have both."""
    return EVAL if metrics.EVAL_LOSS in row else TRAIN


def deduplicate(rows: Iterable[metrics.Row]) -> list[metrics.Row]:
    """Return one row per step and kind, of the highest attempt, ordered by step, then kind."""
    every, latest = list(rows), list[metrics.Row]()
    for kind in (TRAIN, EVAL):
        latest += metrics.latest([row for row in every if _kind_of(row) == kind], metrics.STEP)
    return sorted(latest, key=lambda row: int(row[metrics.STEP]))


def _earlier_rows(metrics_file: Path, attempt: int, step: int) -> list[metrics.Row]:
    """Return the deduplicated rows of the attempts before this one that precede a step."""
    rows = metrics.read_rows(metrics_file)[0] if attempt else []
    earlier = deduplicate(row for row in rows if row.get(metrics.ATTEMPT, 0) < attempt)
    return [row for row in earlier if row[metrics.STEP] < step]


@dataclass
class MissingRowFilter:
    """Filter for the rows that a mirror lacks."""

    metrics_file: Path
    attempt: int
    seen: dict[str, int] = field(default_factory=dict)
    """Kind of row -> last step in the mirror. No entry: no row."""
    _caught_up: bool = False

    def missing(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows to send: older rows that did not arrive, then the new rows."""
        wanted = list(rows)
        if rows and not self._caught_up:
            self._caught_up = True
            first = int(rows[0][metrics.STEP])
            if self.seen.get(TRAIN, -1) < first - 1:
                wanted = [*_earlier_rows(self.metrics_file, self.attempt, first), *rows]
        found = [row for row in wanted if int(row[metrics.STEP]) > self.seen.get(_kind_of(row), -1)]
        for row in found:
            self.seen[_kind_of(row)] = int(row[metrics.STEP])
        return found


TIME, TOTAL_TOKENS = "train/time_s", "train/total_tokens"


def drawn(row: Row) -> dict[str, Value]:
    """Return the values of a row that a tracker draws. Charts of the others would be flat lines."""
    flat = (metrics.ATTEMPT, metrics.SAMPLES, metrics.TOKENS, metrics.WARMUP, metrics.SHARED)
    return {key: value for key, value in row.items() if key not in (*flat, metrics.CUT)}


class Totals:
    """Cumulative training time and tokens of all attempts, for the rows of one attempt in order.

    W&B's own clock also runs between attempts. `metrics_file` holds the rows of earlier attempts.
    """

    def __init__(self, metrics_file: Path, attempt: int) -> None:
        self._metrics_file = metrics_file
        self._attempt = attempt
        self._totals: dict[str, float] = {}

    def add(self, rows: Sequence[Row]) -> list[Row]:
        """Add the totals to rows of training steps, but not to rows of evaluations."""
        if rows and not self._totals:
            # The step of an evaluation may belong to an earlier attempt.
            first = int(rows[0][metrics.STEP]) + (metrics.STEP_TIME not in rows[0])
            self._count(_earlier_rows(self._metrics_file, self._attempt, first))
        found: list[Row] = []
        for row in rows:
            self._count([row])
            known = {key: total for key, total in self._totals.items() if total}
            found.append({**row, **known} if metrics.STEP_TIME in row else row)
        return found

    def _count(self, rows: Sequence[Row]) -> None:
        for total, key in ((TIME, metrics.STEP_TIME), (TOTAL_TOKENS, metrics.TOKENS)):
            values = (row.get(key) for row in rows)
            numbers = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
            self._totals[total] = sum(numbers, self._totals.get(total, 0.0))
