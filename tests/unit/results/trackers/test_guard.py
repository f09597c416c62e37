"""The guard: whatever a mirror does, training goes on and is told the truth afterwards."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from eke.results.trackers.async_tracker import AsyncTracker, MirrorError
from eke.results.trackers.tracker import Row

from .conftest import rows


def make_guard(mirror, finish_s=10.0, patience_s=10.0, max_rows=10_000) -> AsyncTracker:
    """A guard that waits longer for its mirror than while training, or not at all."""
    limits: dict[str, Any] = {"patience_s": patience_s, "max_rows": max_rows}
    return type("LimitedGuard", (AsyncTracker,), limits)(mirror, finish_s)


class Recorder:
    """A mirror that keeps what it gets; the method named `breaks` raises `error` instead."""

    def __init__(self, breaks: str = "", error: BaseException | None = None) -> None:
        self.breaks, self.error = breaks, error
        self.seen: list[tuple[str, object]] = []
        self.may_open = threading.Event()
        self.may_open.set()
        self.pause_s = 0.0
        self.was_killed = False

    def _see(self, name: str, value: object) -> None:
        if name == self.breaks and self.error is not None:
            raise self.error
        self.seen.append((name, value))

    def prepare(self) -> None:
        self._see("prepare", None)

    def open(self) -> None:
        self.may_open.wait()
        if self.was_killed:
            raise ConnectionResetError
        self._see("open", None)

    def log(self, rows: Sequence[Row]) -> None:
        time.sleep(self.pause_s)
        self._see("log", [row["train/global_step"] for row in rows])

    def summary(self, values: Row) -> None:
        self._see("summary", values)

    def close(self, exit_code: int) -> None:
        self._see("close", exit_code)

    def abandon(self) -> None:
        self._see("abandon", None)

    def kill(self) -> None:
        self.was_killed = True
        self.may_open.set()


def test_rows_arrive_once_in_order():
    mirror = Recorder()
    guard = make_guard(mirror)
    guard.log(rows(1, 2))
    guard.summary({"loss": 0.5})
    guard.log(rows(3))
    guard.finish(0)
    guard.finish(0)
    assert mirror.seen == [
        ("prepare", None),
        ("open", None),
        ("log", [1, 2]),
        ("summary", {"loss": 0.5}),
        ("log", [3]),
        ("close", 0),
    ]
    assert guard.problem == ""


def test_rows_are_copied():
    mirror = Recorder()
    mirror.may_open.clear()
    guard = make_guard(mirror, finish_s=10, patience_s=0)
    buffer = rows(1)
    guard.log(buffer)
    buffer[0]["train/global_step"] = 99
    buffer.clear()
    mirror.may_open.set()
    guard.finish(0)
    assert ("log", [1]) in mirror.seen


GONE, LEAVE = ConnectionResetError("gone"), SystemExit("gone")


@pytest.mark.parametrize(
    ("breaks", "error"),
    [
        *[(name, GONE) for name in ("prepare", "open", "log", "summary", "close")],
        # What leaves on the caller's thread, in `prepare`, is the caller's affair.
        *[(name, LEAVE) for name in ("open", "log", "summary", "close")],
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_first_exception_disables_the_tracker(breaks, error, caplog):
    guard = make_guard(Recorder(breaks, error))
    for step in (1, 2, 3):
        guard.log(rows(step))
        guard.summary({"loss": 1.0})
    guard.finish(0)
    lost = {"summary": 2, "close": 0}.get(breaks, 3)
    cause = f"{type(error).__name__}: gone" + (f"; {lost} rows not mirrored" if lost else "")
    assert f"{cause} (" in guard.problem
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "training goes on" in caplog.text


def test_full_queue_drops_and_counts_rows(caplog):
    mirror = Recorder()
    mirror.may_open.clear()
    guard = make_guard(mirror, finish_s=10, patience_s=0, max_rows=5)
    guard.log(rows(1, 2, 3))
    guard.log(rows(4, 5, 6))
    guard.log(rows(7, 8))
    guard.log(rows(9))
    mirror.may_open.set()
    guard.finish(0)
    assert [value for name, value in mirror.seen if name == "log"] == [[1, 2, 3], [7, 8]]
    assert guard.problem == "4 rows not mirrored (metrics.jsonl has every row)"
    assert len(caplog.records) == 1


def test_hung_tracker_is_killed_at_its_deadline():
    mirror = Recorder()
    mirror.may_open.clear()
    guard = make_guard(mirror, finish_s=0.05, patience_s=0)
    guard.log(rows(1, 2))
    guard.finish(0)
    assert mirror.was_killed
    assert "0.05 s; 2 rows " in guard.problem


def test_recovered_tracker_gets_a_new_deadline():
    mirror = Recorder()
    mirror.may_open.clear()
    guard = make_guard(mirror, finish_s=10, patience_s=0.2)
    guard.log(rows(1))  # gives up on it
    mirror.may_open.set()
    mirror.pause_s = 0.01  # a row is seen when `log` returns only if `log` waited for it
    for step in range(2, 100):
        guard.log(rows(step))
        if ("log", [step]) in mirror.seen:
            break
        time.sleep(5 * mirror.pause_s)  # time to catch up
    else:
        pytest.fail("log never waited again")
    guard.finish(0)
    assert guard.problem == ""


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("key s3cret!"), "key ***"),
        (MirrorError("key s3cret!"), "key ***"),
        (ValueError("no way to https://me:s3cret@host/x"), "https://***@host/x"),
    ],
    ids=repr,
)
def test_secret_in_a_message_is_masked(error, shown, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "s3cret!")
    guard = make_guard(Recorder("open", error))
    guard.finish(0)
    assert shown in guard.problem
    assert "s3cret" not in guard.problem + caplog.text
