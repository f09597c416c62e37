"""Nothing is lost: kills, signals, damaged files; the same command gives the very same curve."""

import os
import shutil
import signal
import time

import pytest
from live import SHORT, curve, record_of, rows_of, run_folders
from support import PATIENCE_S, last_wins

pytestmark = pytest.mark.slow

LONG = last_wins(
    *SHORT, "train.steps=400", "train.checkpoint_every=20", "train.log_every=5",
    "data.num_samples=50", "model.dropout=0.1", "model=tiny_bert", "task=masked_lm",
    "schedule=linear", "batch.per_device=8", "hardware=cpu",
)  # fmt: skip
"""Dropout, masking and uneven last batches: every random state and the data position matter."""


def kill_worker(live, folder) -> None:
    os.kill(live.worker_pid(), signal.SIGKILL)
    out = live.finish()
    assert live.process.returncode == 1, out
    record = record_of(folder)
    assert record["outcome"] == "crashed"
    assert "SIGKILL" in record["failure"]["message"]
    seen = {r["train/global_step"] for r in rows_of(folder) if "train/loss" in r}
    assert record["steps_done"] == len(seen) >= live.before + 15, "a logged row was lost"


def ask_to_stop(live, folder, number, outcome) -> str:
    live.signal(number)
    out = live.finish()
    assert live.process.returncode == 75, out
    record = record_of(folder)
    assert record["outcome"] == outcome
    assert "(checkpoint and " in out
    assert "next:" in out
    steps = record["steps_done"]
    assert (folder / "checkpoints" / f"step-{steps:08d}").is_dir(), "stopped without a checkpoint"
    return out


def kill_supervisor(live, folder) -> None:
    worker = live.worker_pid()
    live.signal(signal.SIGKILL)
    live.finish()
    deadline = time.monotonic() + PATIENCE_S
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert record_of(folder)["outcome"] == "preempted", "the orphan left no record"


def ask_twice(live, folder) -> None:
    os.kill(live.worker_pid(), signal.SIGSTOP)  # it would save, and end by itself
    live.signal(signal.SIGINT)
    time.sleep(1)  # the first one has been heard
    live.signal(signal.SIGINT)
    out = live.finish()
    assert live.process.returncode == 75, out
    assert "killed by a second signal" in out
    assert record_of(folder)["outcome"] == "cancelled"


def test_interrupted_run_resumes_the_same_curve(start, train_forked, tmp_path, train_ranks) -> None:
    def going(steps: int = 15):
        live = start(*LONG)
        live.wait_for_more(steps)
        (folder,) = run_folders(tmp_path)
        return live, folder

    live, folder = going(30)
    os.kill(live.worker_pid(), signal.SIGSTOP)
    second = train_forked(*LONG)
    assert second.code == 16, second.text
    assert "is in use" in second.text
    kill_worker(live, folder)
    shutil.rmtree(folder / "checkpoints")  # then it starts over
    ask_to_stop(*going(), signal.SIGINT, "cancelled")
    assert {(r["attempt"], r["train/global_step"]) for r in rows_of(folder)} >= {(0, 1), (1, 1)}
    steps = record_of(folder)["steps_done"]
    first = curve(folder)[:steps]
    (folder / "metrics.jsonl").unlink()
    said = f"metrics.jsonl lacks {steps} of the checkpoint's {steps} steps"
    assert said in ask_to_stop(*going(), signal.SIGTERM, "preempted")
    assert any(said in warning for warning in record_of(folder)["warnings"])
    kill_supervisor(*going())
    ask_twice(*going(45))
    newest, older = sorted((folder / "checkpoints").glob("step-*"), reverse=True)
    weights = newest / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    done = train_forked(*LONG)
    assert done.code == 0, done.text
    assert f"skipping checkpoint {newest.name}" in done.text
    assert f"({older.name})" in done.text
    assert record_of(folder)["attempt"] == 5
    found = first + curve(folder)
    assert len(found) == 400
    shutil.move(folder, tmp_path / "interrupted")
    assert found == curve(train_ranks(*LONG))
