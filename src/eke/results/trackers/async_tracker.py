"""Asynchronous tracker: one thread, a bounded queue, and a circuit breaker around a mirror.

Training must not stop or wait if a server hangs or a helper process dies: SLURM's SIGTERM goes to
every process of a job, wandb-core dies of it, and the next `log` raises.

A resumed run repeats the steps since its checkpoint, bit for bit, and rows of the previous attempt
may be lost. So the mirror's last step is read, older rows are sent again, repeated ones skipped.
Rows get the cumulative training time and tokens, since W&B's clock also runs between attempts.
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

SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
"""Environment variables whose values are masked in messages of libraries."""

EVERY_ROW = "(metrics.jsonl has every row)"
"""Appended to every problem."""

KILLED_S = 1.0
"""Seconds to wait for a killed mirror."""

PATIENCE_S = 0.02
"""Seconds that `log` waits for its rows to be handed over, so that the work does not fall into the
next measured step; a mirror that overran it once is not waited for until it has caught up."""

MAX_ROWS = 10_000
"""Rows that may wait; later ones are dropped and counted. 10 MB at 1 kB a row."""


class Mirror(Protocol):
    """Tracker client driven by a guard; methods may raise, and all but `prepare` may hang."""

    def prepare(self) -> None:
        """Local work on the caller's thread: imports, environment, helper processes."""

    def open(self) -> None:
        """Start the run; by default, the first row does."""
        return

    def log(self, rows: Sequence[Row]) -> None:
        """Hand over rows."""

    def summary(self, values: Row) -> None:
        """Hand over values of the whole run."""

    def close(self, exit_code: int) -> None:
        """Finish the run; raises if not everything arrived."""

    def abandon(self) -> None:
        """Release resources after another method raised; by default, the worker's exit does."""
        return

    def kill(self) -> None:
        """Make a hanging method on another thread raise; by default, nothing can."""
        return


class Guard:
    """Tracker around a mirror: no method raises or waits longer than its limit.

    The mirror is opened and fed by one daemon thread. Its first exception switches it off for good,
    with one logged warning; rows that could not be handed over are counted in `problem`, which
    names the command that sends them (`remedy`). A quiet one logs nothing (outside training).
    """

    def __init__(
        self,
        mirror: Mirror,
        finish_s: float,
        remedy: str = "",
        patience_s: float = PATIENCE_S,
        max_rows: int = MAX_ROWS,
        is_quiet: bool = False,
    ) -> None:
        self._mirror = mirror
        self._finish_s, self._patience_s, self._max_rows = finish_s, patience_s, max_rows
        self._remedy = f" -> {remedy}" if remedy else ""
        self._is_quiet = is_quiet
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._reason = ""
        self._pending = 0
        self._lost = 0
        self._late = False
        self._finishing = False
        self._ended = threading.Event()
        try:
            mirror.prepare()
        except Exception as error:
            self._stop(describe_error(error))
            self._ended.set()
        else:
            threading.Thread(target=self._work, name="eke-tracker", daemon=True).start()

    def log(self, rows: Sequence[Row]) -> None:
        """Queue rows, and give the mirror `patience_s` to take them."""
        batch = tuple(dict(row) for row in rows)
        with self._changed:
            if self._reason or self._finishing:
                self._lost += len(batch)
                return
            if self._pending + len(batch) > self._max_rows:
                if not self._lost:
                    why = "new ones are dropped, metrics.jsonl has them"
                    _log.warning(
                        "tracker: %d rows wait to be mirrored already; %s", self._pending, why
                    )
                self._lost += len(batch)
                return
            self._pending += len(batch)
            self._jobs.put((partial(self._mirror.log, batch), len(batch)))
            if not self._late:
                self._late = not self._changed.wait_for(
                    lambda: self._pending == 0 or bool(self._reason), self._patience_s
                )

    def summary(self, values: Row) -> None:
        """Queue values of the whole run."""
        with self._changed:
            if not (self._reason or self._finishing):
                self._jobs.put((partial(self._mirror.summary, dict(values)), 0))

    def finish(self, exit_code: int) -> None:
        """Close the mirror; waits `finish_s` + 1 seconds at most. A second call does nothing."""
        with self._changed:
            if self._finishing:
                return
            self._finishing = True
        self._jobs.put((partial(self._mirror.close, exit_code), 0))
        self._jobs.put(None)
        if not self._ended.wait(self._finish_s):
            self._stop(f"did not finish within {self._finish_s:g} s")
            # Otherwise the interpreter's exit would wait for it.
            with suppress(Exception):
                self._mirror.kill()
            self._ended.wait(KILLED_S)

    @property
    def problem(self) -> str:
        """Why the mirror is incomplete; empty while it is whole."""
        with self._changed:
            lost = f"{format_number(self._lost, 'row')} not mirrored" if self._lost else ""
            cause = "; ".join(text for text in (self._reason, lost) if text)
            return f"{cause} {EVERY_ROW}{self._remedy}" if cause else ""

    def _work(self) -> None:
        """Open the mirror and feed it until it is closed or raises; the thread's body."""
        try:
            self._mirror.open()
            for job, num_rows in iter(self._jobs.get, None):
                job()
                self._done(num_rows)
        except BaseException as error:  # sys.exit, too, would end the thread silently
            self._stop(describe_error(error))
            with suppress(BaseException):  # `wandb.teardown` leaves by sys.exit if wandb-core died
                self._mirror.abandon()
        finally:
            self._ended.set()

    def _done(self, num_rows: int) -> None:
        with self._changed:
            if self._reason:
                return  # already counted as lost
            self._pending -= num_rows
            self._late = self._late and self._pending > 0
            self._changed.notify_all()

    def _stop(self, reason: str) -> None:
        """Switch the mirror off for good; only the first reason counts."""
        with self._changed:
            if self._reason:
                return
            self._reason = reason
            self._lost += self._pending
            self._pending = 0
            self._changed.notify_all()
        if not self._is_quiet:
            _log.warning("tracker: %s; training goes on", self.problem)


def describe_error(error: BaseException) -> str:
    """What stopped a tracker, as one line, secrets masked."""
    text = one_line(error)
    return text if isinstance(error, MirrorError) else f"stopped by {text}"


def one_line(error: BaseException) -> str:
    """An exception as one line, secrets masked: `ValueError: text`."""
    text = " ".join(str(error).split())
    for secret in filter(None, map(os.environ.get, SECRETS)):
        text = text.replace(secret, "***")
    names = [] if isinstance(error, MirrorError) else [type(error).__name__]
    return ": ".join(filter(None, [*names, mask(text)]))


class MirrorError(Exception):
    """A problem found by a mirror, with a message for the user."""


TRAIN, EVAL = "train", "eval"


def kind_of(row: Mapping[str, object]) -> str:
    """Kind of a row, TRAIN or EVAL; a step can have both."""
    return EVAL if metrics.EVAL_LOSS in row else TRAIN


def deduplicate(rows: Iterable[metrics.Row]) -> list[metrics.Row]:
    """One row per step and kind, the highest attempt's; by step, training before evaluation."""
    kinds: dict[str, list[metrics.Row]] = {TRAIN: [], EVAL: []}
    for row in rows:
        kinds[kind_of(row)].append(row)
    latest = [row for each in kinds.values() for row in metrics.latest(each, metrics.STEP)]
    return sorted(latest, key=lambda row: int(row[metrics.STEP]))


@dataclass
class CatchUp:
    """Filter for the rows that a mirror lacks."""

    metrics_file: Path
    attempt: int
    seen: dict[str, int] = field(default_factory=dict)
    """Kind of row -> last step in the mirror; absent: none."""
    _caught_up: bool = False

    def missing(self, rows: Sequence[Row]) -> list[Row]:
        """Rows to send: older ones that did not arrive, then the new ones of `rows`."""
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
        if self.seen.get(TRAIN, -1) >= first_step - 1:
            return []
        return [
            row
            for row in earlier_rows(self.metrics_file, self.attempt)
            if row[metrics.STEP] < first_step and self._is_new(row)
        ]


def earlier_rows(metrics_file: Path, attempt: int) -> list[metrics.Row]:
    """Deduplicated rows of the attempts before this one."""
    rows = metrics.read_rows(metrics_file)[0] if attempt else []
    return deduplicate(row for row in rows if row.get(metrics.ATTEMPT, 0) < attempt)


TIME, TOTAL_TOKENS = "train/time_s", "train/total_tokens"
TOTALS = {TIME: metrics.STEP_TIME, TOTAL_TOKENS: metrics.TOKENS}
"""Cumulative value over all attempts -> key of a row."""

CONSTANT = (
    metrics.ATTEMPT, metrics.SAMPLES, metrics.TOKENS, metrics.WARMUP, metrics.SHARED, metrics.CUT,
)  # fmt: skip
"""Keys of metrics.jsonl that trackers would each draw as a flat line."""


def drawn(row: Row) -> dict[str, Value]:
    """The values of a row that a tracker draws."""
    return {key: value for key, value in row.items() if key not in CONSTANT}


class Totals:
    """Cumulative training time and tokens, added to the rows of an attempt (its number) in order.

    `metrics_file` holds the rows of earlier ones.
    """

    def __init__(self, metrics_file: Path, attempt: int) -> None:
        self._metrics_file = metrics_file
        self._attempt = attempt
        self._totals: dict[str, float] = {}

    def add(self, rows: Sequence[Row]) -> list[Row]:
        """Add them to rows of training steps; an evaluation joins the row of its step."""
        if rows and not self._totals:
            # The step of an evaluation may belong to an earlier attempt.
            first_step = int(rows[0][metrics.STEP]) + (metrics.STEP_TIME not in rows[0])
            earlier = earlier_rows(self._metrics_file, self._attempt)
            self._count([row for row in earlier if row[metrics.STEP] < first_step])
        found: list[Row] = []
        for row in rows:
            self._count([row])
            known = {key: total for key, total in self._totals.items() if total}
            found.append({**row, **known} if metrics.STEP_TIME in row else row)
        return found

    def _count(self, rows: Sequence[Row]) -> None:
        for total, key in TOTALS.items():
            self._totals[total] = sum(
                (_number(r.get(key)) for r in rows), self._totals.get(total, 0.0)
            )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
