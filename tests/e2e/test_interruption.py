"""Nothing is lost: kills, signals, damaged files; the same command gives the very same curve."""

import os
import shutil
import signal
import time

import pytest
from live import SHORT, curve, record_of, rows_of, run_folders, undisturbed_curve
from support import PATIENCE_S, last_wins

pytestmark = pytest.mark.slow

LONG = last_wins(
    *SHORT, "train.steps=120", "train.checkpoint_every=20", "train.log_every=5",
    "data.num_samples=50", "model.dropout=0.1", "model=tiny_bert", "task=masked_lm",
    "schedule=linear", "batch.per_device=8",
)  # fmt: skip
"""Dropout, masking and uneven last batches: every random state and the data position matter."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The curve of the same configuration, never interrupted."""
    found = undisturbed_curve(tmp_path_factory.mktemp("undisturbed"), *LONG)
    assert len(found) == 120
    return found


def test_kill_9_of_the_worker(start, train_py, tmp_path, undisturbed) -> None:
    live = start(*LONG)
    live.wait_for_step(50)
    os.kill(live.worker_pid(), signal.SIGKILL)
    out = live.finish()
    assert live.process.returncode == 1, out
    (folder,) = run_folders(tmp_path)
    record = record_of(folder)
    assert record["outcome"] == "crashed"
    assert "SIGKILL" in record["failure"]["message"]
    seen = [r for r in rows_of(folder) if "train/loss" in r]
    assert record["steps_done"] == len(seen) >= 50, "a logged row was lost"
    done = train_py(*LONG)
    assert done.code == 0, done.text
    assert curve(folder) == undisturbed
    assert record_of(folder)["attempt"] == 1


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        pytest.param(signal.SIGINT, "cancelled", id="ctrl-c"),
        pytest.param(signal.SIGTERM, "preempted", id="sigterm"),
    ],
)
def test_asked_to_stop(number, outcome, start, train_py, tmp_path, undisturbed) -> None:
    live = start(*LONG)
    live.wait_for_step(30)
    live.signal(number)
    out = live.finish()
    assert live.process.returncode == 75, out
    (folder,) = run_folders(tmp_path)
    record = record_of(folder)
    assert record["outcome"] == outcome
    assert "the same command continues" in out
    steps = record["steps_done"]
    assert (folder / "checkpoints" / f"step-{steps:08d}").is_dir(), "stopped without a checkpoint"
    assert train_py(*LONG).code == 0
    assert curve(folder) == undisturbed


def test_who_asks_twice_has_cancelled_it(start, tmp_path) -> None:
    live = start(*last_wins(*LONG, "train.steps=1000000"))
    live.wait_for_step(5)
    os.kill(live.worker_pid(), signal.SIGSTOP)  # it would save, and end by itself
    live.signal(signal.SIGINT)
    time.sleep(1)  # the first one has been heard
    live.signal(signal.SIGINT)
    out = live.finish()
    assert live.process.returncode == 75, out
    assert "killed by a second signal" in out
    (folder,) = run_folders(tmp_path)
    assert record_of(folder)["outcome"] == "cancelled"


def test_killing_the_supervisor_stops_the_worker_cleanly(start, train_py, tmp_path, undisturbed):
    live = start(*LONG)
    live.wait_for_step(30)
    worker = live.worker_pid()
    live.signal(signal.SIGKILL)
    live.finish()
    (folder,) = run_folders(tmp_path)
    deadline = time.monotonic() + PATIENCE_S
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert record_of(folder)["outcome"] == "preempted", "the orphan left no record"
    assert train_py(*LONG).code == 0
    assert curve(folder) == undisturbed


def test_damaged_checkpoints_are_skipped(start, train_py, tmp_path, undisturbed) -> None:
    live = start(*LONG)
    live.wait_for_step(70)
    os.kill(live.worker_pid(), signal.SIGKILL)
    live.finish()
    (folder,) = run_folders(tmp_path)
    newest, older = sorted((folder / "checkpoints").glob("step-*"), reverse=True)
    weights = newest / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    done = train_py(*LONG)
    assert done.code == 0, done.text
    assert f"skipping checkpoint {newest.name}" in done.text
    assert f"({older.name})" in done.text
    assert curve(folder) == undisturbed


def test_without_any_checkpoint_it_starts_over(start, train_py, tmp_path, undisturbed) -> None:
    live = start(*LONG)
    live.wait_for_step(30)
    os.kill(live.worker_pid(), signal.SIGKILL)
    live.finish()
    (folder,) = run_folders(tmp_path)
    shutil.rmtree(folder / "checkpoints")
    assert train_py(*LONG).code == 0
    assert curve(folder) == undisturbed


def test_a_curve_that_was_deleted_is_missed(start, train_py, tmp_path) -> None:
    live = start(*LONG)
    live.wait_for_step(70)
    os.kill(live.worker_pid(), signal.SIGKILL)
    live.finish()
    (folder,) = run_folders(tmp_path)
    newest = int(max(folder.glob("checkpoints/step-*")).name.removeprefix("step-"))
    (folder / "metrics.jsonl").unlink()
    done = train_py(*LONG)
    assert done.code == 0, done.text
    said = f"metrics.jsonl lacks {newest} of the {newest} steps"
    assert said in done.text
    assert any(said in warning for warning in record_of(folder)["warnings"])


def test_two_at_once_on_one_run(start, train_py) -> None:
    endless = last_wins(*LONG, "train.steps=1000000")
    live = start(*endless)
    live.wait_for_step(5)
    second = train_py(*endless)
    assert second.code == 2, second.text
    assert "is being worked on" in second.text
    live.signal(signal.SIGINT)
    live.finish()
