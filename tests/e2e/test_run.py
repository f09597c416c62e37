"""One command trains, records and tells."""

import pytest
from live import SHORT, attempts, record_of, rows_of, run_folders
from support import DIVERGES, PATIENCE_S, last_wins


def test_run_writes_a_correct_record(train_py, tmp_path) -> None:
    done = train_py(*SHORT, "seed=3")
    assert done.code == 0, done.text
    (folder,) = run_folders(tmp_path)
    record = record_of(folder)
    assert record["outcome"] == "ok"
    assert record["exit_code"] == 0
    assert record["steps_done"] == 20
    assert record["run_id"] == folder.name
    rows = [r for r in rows_of(folder) if "train/loss" in r]
    assert [r["train/global_step"] for r in rows] == list(range(1, 21))
    warm = [r for r in rows if "train/warmup" in r]
    assert len(warm) == 2, "experiment=smoke leaves out two steps"
    assert record["timing"]["steady_step_s"]["n"] == 18
    assert len(record["timing"]["warmup_steps_s"]) == 2
    assert record["throughput"]["samples_per_s"] == pytest.approx(
        4 * 18 / sum(r["train/step_time_s"] for r in rows[2:])
    )
    assert record["loss"]["train_final"] == rows[-1]["train/loss"]
    assert record["throughput"]["mfu_frac"] is None, "a CPU has no datasheet peak here"
    predicted, measured = record["memory"]["predicted"], record["memory"]["measured"]
    assert predicted["low"] <= measured["peak_allocated_bytes"] <= predicted["high"]
    assert sum(predicted["components"].values()) == predicted["expected"]
    assert predicted["method"] == "closed_form", "nothing is traced for what surely fits"
    parameters = record["plan"]["size"]["num_parameters"]
    assert record["memory"]["measured"]["peak_allocated_bytes"] > 4 * 4 * parameters
    stages = record["memory"]["measured"]["stages"]
    assert list(stages) == ["empty", "kernels_loaded", "weights", "training"]
    assert record["effective"]["matmul_dtypes"] == ["float32"]
    assert record["effective"]["optimizer_bytes_per_parameter"] == pytest.approx(8)
    for said in ("samples/s", "peak", "eval loss", "step", "saved"):
        assert said in done.out


@pytest.mark.slow
def test_changed_software_reruns_and_changed_presentation_does_not(
    start, train_forked, tmp_path
) -> None:
    unread = start(*SHORT)
    unread.process.stdout.close()  # as behind `| head`: it ends well all the same
    assert unread.process.wait(PATIENCE_S) == 0
    (folder,) = run_folders(tmp_path)
    other = train_forked(*last_wins(*SHORT, "train.log_every=1", "tracker=wandb"))
    assert other.code == 0
    assert "rerun=true" in other.out, "the same command is answered from the record"
    assert len(run_folders(tmp_path)) == len(attempts(folder)) == 1
    rerun = train_forked(*SHORT, "rerun=true")
    assert rerun.code == 0, rerun.text
    assert {f.name for f in run_folders(tmp_path)} == {folder.name, f"{folder.name}-2"}


@pytest.mark.slow
def test_divergence_is_recorded_as_outcome(train_forked, tmp_path) -> None:
    command = (*SHORT, *DIVERGES, "train.log_every=1")
    done = train_forked(*command)
    assert done.code == 1, done.text
    record = record_of(run_folders(tmp_path)[0])
    assert record["outcome"] == "diverged"
    assert "Traceback" not in done.text
    again = train_forked(*command)
    assert again.code == 1
    assert "rerun=true" in again.out, "diverged is final"


def test_plan_only_starts_no_run(train_main, tmp_path) -> None:
    done = train_main("plan_only=true", "batch.target=64", "precision=fp16")
    assert done.code == 0, done.text
    assert done.out.startswith("fits ")
    assert not (tmp_path / "runs").exists()


def test_plan_for_a_declared_gpu(train_main) -> None:
    planned = train_main("plan_only=true", "hardware=h200", "model=llama_1b", "precision=tf32")
    assert planned.code == 0, planned.text
    assert "H200" in planned.out
    refused = train_main("hardware=h200")
    assert refused.code == 2
    assert "hardware=auto" in refused.text
