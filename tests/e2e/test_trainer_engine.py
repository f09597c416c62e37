"""engine=trainer from the command line: records, interruption, two processes, W&B's file."""

import json
import shutil
import signal

import pytest
from live import SHORT, record_of, rows_of, run_folders
from support import last_wins

from eke.plan.record import metrics

TRAINER = last_wins(*SHORT, "engine=trainer", "batch.accumulation=2")
LONG = last_wins(
    *TRAINER,
    "train.steps=200",
    "train.checkpoint_every=null",
    "train.log_every=5",
    "data.num_samples=50",
    "model.dropout=0.1",
    "hardware=cpu",
)


def losses(folder) -> list[tuple[int, float, float]]:
    rows = metrics.latest(rows_of(folder), metrics.LOSS)
    return [(r[metrics.STEP], r[metrics.LOSS], r["train/grad_norm"]) for r in rows]


@pytest.mark.slow
def test_run_writes_a_correct_record_with_16_bit_formats(train_forked, tmp_path) -> None:
    """Trainer itself runs fp16 on a CPU as float32 without a word (transformers 5.23)."""
    more = ("trainer.extra.neftune_noise_alpha=5", "precision=fp16", "tracker=wandb")
    done = train_forked(*last_wins(*TRAINER, *more))
    assert done.code == 0, done.text
    assert "engine=trainer" in done.err
    (folder,) = run_folders(tmp_path)
    record = record_of(folder)
    assert (record["outcome"], record["steps_done"]) == ("ok", 20)
    assert record["timing"]["steady_step_s"]["n"] == 18
    assert record["timing"]["checkpoint_s"] > 0
    assert record["memory"]["measured"]["peak_allocated_bytes"] > 0
    assert record["effective"]["trainer"]["class"] == "transformers.trainer.Trainer"
    assert record["effective"]["trainer"]["arguments"]["neftune_noise_alpha"] == 5
    assert "float16" in record["effective"]["matmul_dtypes"]
    assert record["effective"]["loss_scale"] > 1
    assert record["loss"]["eval_final"] < record["loss"]["eval_start"]
    assert [step for step, _, _ in losses(folder)] == list(range(1, 21))
    assert (folder / "model" / "config.json").exists()
    log = (folder / "train.log").read_text()
    assert "train_runtime" not in log, "Trainer prints what the record has"
    assert not list(folder.glob("*.bin")) + list(folder.glob("checkpoint-*")), "of Trainer's own"
    assert list((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert not [w for w in record["warnings"] if "tracker" in w]


@pytest.mark.slow
def test_stopped_run_resumes_bit_exact(start, train_ranks, tmp_path) -> None:
    live = start(*LONG)
    live.wait_for_step(20)
    live.signal(signal.SIGINT)
    out = live.finish()
    assert live.process.returncode == 75, out
    (folder,) = run_folders(tmp_path)
    record = record_of(folder)
    assert record["outcome"] == "cancelled"
    assert 20 <= record["steps_done"] < 200
    (folder / "record.json").unlink()
    assert train_ranks(*LONG) == folder
    assert record_of(folder)["attempt"] == 1
    interrupted = losses(folder)
    shutil.move(folder, tmp_path / "interrupted")
    assert interrupted == losses(train_ranks(*LONG))


@pytest.mark.slow
def test_two_processes_stop_together(start, tmp_path) -> None:
    two = ("distributed=ddp", "distributed.num_processes=2", "batch.per_device=2")
    live = start(*last_wins(*LONG, *two))
    live.wait_for_step(20)
    live.signal(signal.SIGTERM)
    out = live.finish()
    assert live.process.returncode == 75, out
    (folder,) = run_folders(tmp_path)
    record = record_of(folder)
    assert record["outcome"] == "preempted"
    steps = record["steps_done"]
    state = folder / "checkpoints" / f"step-{steps:08d}" / "state.json"
    assert json.loads(state.read_text())["step"] == steps
