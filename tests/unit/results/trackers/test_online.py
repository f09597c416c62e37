"""W&B online, with the real SDK against a loopback server: one that works and ones that do not."""

import threading

import pytest

from eke.results.trackers import Tracker, build_tracker
from eke.results.trackers.async_tracker import AsyncTracker
from eke.results.trackers.wandb import WandbRun

from .conftest import RUN_ID, ask, rows, start_child, track
from .stub import Server


def finish_in_time(tracker: Tracker) -> None:
    """`finish`, failing where it would hang the tests."""
    thread = threading.Thread(target=tracker.finish, args=(0,), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "finish did not return"


@pytest.mark.slow
def test_silent_server_does_not_block(online, tmp_path):
    online.answers.clear()
    child = start_child(tmp_path, "online", "1")
    ask(child, 100)
    # Neither `finish` nor the interpreter's exit waits for the server.
    stdout, stderr = child.communicate(timeout=80)  # W&B's own patience is 90 s
    assert "1 s; 100 rows " in stdout
    assert stderr.count("training goes on") == 1
    assert child.returncode == 0


def test_stalled_server_does_not_block(online, make_run):
    run = make_run("online")
    # Patient, so that the run has been opened when the server goes away.
    tracker = type("Patient", (AsyncTracker,), {"patience_s": 10})(
        WandbRun(run, upload_s=1), finish_s=10
    )
    tracker.log(rows(1))
    online.answers.clear()
    tracker.log(rows(2))
    finish_in_time(tracker)
    assert "within 1 s" in tracker.problem
    assert "not mirrored" not in tracker.problem


def test_missing_account_is_reported(server, make_run, monkeypatch):
    run = make_run("online")
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("HOME", str(run.directory))
    tracker = build_tracker(run)
    tracker.log(rows(1))
    finish_in_time(tracker)
    assert "wandb login" in tracker.problem


def steps_of(server: Server) -> list[int]:
    return [row["train/global_step"] for row in server.rows.get(RUN_ID, [])]


def test_repeated_steps_after_a_resume_are_one_row(online, make_run):
    # The checkpoint was at step 3; the rows of 4 and 5 come twice, and an evaluation joins step 5.
    evaluation: dict[str, float | int | str] = {"train/global_step": 5, "eval/loss": 0.25}
    track(make_run("online"), rows(1, 2, 3, 4, 5))
    assert "RunResumeStatus" not in online.operations
    again = track(make_run("online", attempt=1), rows(4, 5), [evaluation], rows(6, 7))
    assert again.problem == ""
    assert "RunResumeStatus" in online.operations, "a later attempt asks to be appended"
    assert steps_of(online) == [1, 2, 3, 4, 5, 6, 7]
    assert [row["_step"] for row in online.rows[RUN_ID]] == [1, 2, 3, 4, 5, 6, 7]
    known = ("/graphql", "/files/", "/upload/")
    assert [path for path in online.requests if not path.startswith(known)] == [], "no telemetry"
    uploads = {path.rpartition("/")[2] for path in online.requests if path.startswith("/upload/")}
    assert uploads <= {"config.yaml", "wandb-summary.json"}


def test_rejected_rows_are_sent_by_the_next_attempt(online, make_run, tmp_path):
    online.refusals = {"file_stream": 404}
    problem = track(make_run("online"), rows(1, 2, 3, 4)).problem
    assert "the upload failed" in problem
    assert "404" in problem
    assert problem.endswith(f"-> eke sync {tmp_path}")
    assert steps_of(online) == []
    online.refusals = {}
    assert track(make_run("online", attempt=1), rows(4, 5)).problem == ""
    assert steps_of(online) == [1, 2, 3, 4, 5]


def test_slow_server_receives_all_rows(online, make_run):
    online.delay_s = 0.1
    assert track(make_run("online"), rows(1, 2), rows(3)).problem == ""
    assert steps_of(online) == [1, 2, 3]


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ("UpsertBucket", 403),
        pytest.param("file_stream", 503, marks=pytest.mark.slow),
        pytest.param("/", 500, marks=pytest.mark.slow),
    ],
)
def test_rejecting_server_does_not_block_training(what, status, online, tmp_path):
    online.refusals = {what: status}
    child = start_child(tmp_path, "online", "1")
    ask(child, 100)
    stdout, stderr = child.communicate(timeout=80)  # W&B's own patience is 90 s
    assert child.returncode == 0
    assert "metrics.jsonl" in stdout
    assert stderr.count("training goes on") == 1
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_unreachable_server_does_not_block_training(server, tmp_path):
    url = server.url
    server.server_close()  # the port refuses connections now
    child = start_child(tmp_path, "online", "1", WANDB_BASE_URL=url, WANDB_API_KEY="ab" * 20)
    ask(child, 100)
    stdout, stderr = child.communicate(timeout=80)  # W&B's own patience is 90 s
    assert child.returncode == 0
    assert "100 rows not mirrored" in stdout
    assert "Traceback" not in stderr
