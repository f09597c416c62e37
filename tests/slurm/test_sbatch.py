"""slurm/train.sbatch as bash runs it: signals reach the run, and an interrupted run is requeued."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from live import SHORT, record_of, rows_of, run_folders
from support import REPO, environment, last_wins

pytestmark = pytest.mark.slow

SCRIPT = REPO / "slurm" / "train.sbatch"


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch job, with a scontrol that notes what it is asked."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    scontrol = bin_folder / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    (tmp_path / "train.py").symlink_to(REPO / "train.py")
    return {
        **environment(tmp_path),
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
    }


def submit(cluster: dict[str, str], *overrides: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["bash", str(SCRIPT), *overrides],
        env=cluster,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(tmp_path: Path, job: "subprocess.Popen[str]", step: int) -> None:
    while job.poll() is None:
        files = list(tmp_path.glob("runs/*/metrics.jsonl"))
        if any(r["train/global_step"] >= step for f in files for r in rows_of(f.parent)):
            return


def test_a_finished_run_is_not_requeued(cluster, tmp_path) -> None:
    job = submit(cluster, *SHORT)
    out, _ = job.communicate(timeout=120)
    assert job.returncode == 0, out
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("array", [False, True], ids=["job", "array"])
def test_a_warning_saves_and_requeues(array, cluster, tmp_path) -> None:
    if array:
        cluster = {**cluster, "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
    long = last_wins(*SHORT, "train.steps=2000", "train.log_every=5")
    job = submit(cluster, *long)
    wait_for_step(tmp_path, job, 20)
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=120)
    assert job.returncode == 75, out
    assert (tmp_path / "asked").read_text() == f"requeue {'5_3' if array else '7'}\n"
    (folder,) = run_folders(tmp_path)
    assert record_of(folder)["outcome"] == "preempted"


def test_a_refused_command_fails_the_job(cluster, tmp_path) -> None:
    job = submit(cluster, "precision=bf17")
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 2
    assert "precision=bf16" in out
    assert not (tmp_path / "asked").exists()
