"""The offline W&B run of a real training: every row, the factors, the identity, and no secret."""

import os
import subprocess
import sys

import pytest
from live import SHORT, record_of, rows_of, run_folders
from support import REPO, environment, last_wins
from wandb_reader import read_wandb_file

WITH_WANDB = last_wins(*SHORT, "tracker=wandb", "precision=bf16", "tracker.group=ladder")


@pytest.mark.slow
def test_a_run_is_mirrored_whole(tmp_path) -> None:
    secret = "0123456789abcdef0123456789abcdef01234567"
    done = subprocess.run(
        [sys.executable, str(REPO / "train.py"), *WITH_WANDB],
        cwd=tmp_path,
        env={**environment(tmp_path), "WANDB_API_KEY": secret},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = run_folders(tmp_path)
    assert not [w for w in record_of(folder)["warnings"] if "tracker" in w]
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert file.name == f"run-{folder.name}.wandb", "the run's id is eke's"
    mirrored = read_wandb_file(file)
    assert len(rows_of(folder)) == 22, "20 steps and two evaluations"
    assert [row["_step"] for row in mirrored.rows] == list(range(21)), "one row a step"
    losses = [row["train/loss"] for row in mirrored.rows if "train/loss" in row]
    evaluations = [row["eval/loss"] for row in mirrored.rows if "eval/loss" in row]
    assert evaluations == [row["eval/loss"] for row in rows_of(folder) if "eval/loss" in row]
    assert losses == [row["train/loss"] for row in rows_of(folder) if "train/loss" in row]
    assert mirrored.config["precision"] == "bf16"
    assert mirrored.config["cfg"]["optimizer"]["lr"] == 0.001
    assert mirrored.exit_code == 0
    for root, _, names in os.walk(tmp_path):
        for name in names:
            with open(os.path.join(root, name), "rb") as opened:
                assert secret.encode() not in opened.read(), f"the key is in {name}"
