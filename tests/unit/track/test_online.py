"""W&B online, with the real SDK against a loopback server: one that works and ones that do not."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from eke.track import TrackedRun, Tracker, build_tracker
from eke.track.guard import Guard, Limits
from eke.track.wandb_run import WandbRun

from .conftest import RUN_ID, ask, find_wandb_files, rows, start_child
from .stub import Server


def finish_in_time(tracker: Tracker) -> None:
    """`finish`, failing where it would hang the tests."""
    thread = threading.Thread(target=tracker.finish, args=(0,), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "finish did not return"


def test_rows_arrive(online: Server, make_run: Callable[..., TrackedRun]) -> None:
    tracker = build_tracker(make_run("online"))
    tracker.log(rows(1, 2, 3))
    tracker.finish(4)
    assert tracker.problem == ""
    assert [row["train/global_step"] for row in online.rows[RUN_ID]] == [1, 2, 3]
    assert online.exit_codes == {RUN_ID: 4}
    assert online.runs[RUN_ID]["groupName"] == "sweep-1"
    assert online.runs[RUN_ID]["displayName"] == "precision=bf16 optimizer=adafactor"


def test_no_telemetry_is_sent(online: Server, make_run: Callable[..., TrackedRun]) -> None:
    tracker = build_tracker(make_run("online"))
    tracker.finish(0)
    known = ("/graphql", "/files/", "/upload/")
    assert [path for path in online.requests if not path.startswith(known)] == []
    uploads = {path.rpartition("/")[2] for path in online.requests if path.startswith("/upload/")}
    assert uploads <= {"config.yaml", "wandb-summary.json"}


def test_a_server_that_never_answers(online: Server, tmp_path: Path) -> None:
    online.answers.clear()
    child = start_child(tmp_path, "online", "1")
    ask(child, 100)
    # Neither `finish` nor the interpreter's exit waits for the server.
    stdout, stderr = child.communicate(timeout=30)
    assert "did not finish within 1 s; 100 rows not mirrored" in stdout
    assert stderr.count("training goes on") == 1
    assert child.returncode == 0


def test_a_server_that_stops_answering(online: Server, make_run: Callable[..., TrackedRun]) -> None:
    run = make_run("online")
    # Patient, so that the run has been opened when the server goes away.
    tracker = Guard(WandbRun(run, upload_s=1), Limits(finish_s=10, patience_s=10))
    tracker.log(rows(1))
    online.answers.clear()
    tracker.log(rows(2))
    finish_in_time(tracker)
    (file,) = find_wandb_files(run.directory)
    assert f"did not end within 1 s -> wandb sync {file.parent}" in tracker.problem
    assert "not mirrored" not in tracker.problem


def test_a_server_that_refuses_rows(online: Server, make_run: Callable[..., TrackedRun]) -> None:
    online.refuses_rows = True
    tracker = build_tracker(make_run("online"))
    tracker.log(rows(1))
    tracker.finish(0)
    assert "the upload failed" in tracker.problem
    assert "404" in tracker.problem
    assert "wandb sync" in tracker.problem


def test_no_account(
    server: Server, make_run: Callable[..., TrackedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("online")
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("HOME", str(run.directory))
    tracker = build_tracker(run)
    tracker.log(rows(1))
    finish_in_time(tracker)
    assert "wandb login" in tracker.problem


def test_a_later_attempt_asks_to_be_appended(
    online: Server, make_run: Callable[..., TrackedRun]
) -> None:
    for attempt in (0, 1):
        asked = len(online.operations)
        tracker = build_tracker(make_run("online", attempt=attempt))
        tracker.log(rows(attempt + 1))
        tracker.finish(0)
        assert tracker.problem == ""
        assert ("RunResumeStatus" in online.operations[asked:]) is (attempt == 1)
    assert [row["train/global_step"] for row in online.rows[RUN_ID]] == [1, 2]
