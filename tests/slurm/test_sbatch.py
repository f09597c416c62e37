"""slurm/train.sbatch as bash runs it: how a run ends that nobody interrupts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from live import SHORT
from support import REPO, environment

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
    srun = bin_folder / "srun"
    srun.write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
    srun.chmod(0o755)
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


def test_a_finished_run_is_not_requeued(cluster, tmp_path) -> None:
    job = submit(cluster, *SHORT)
    out, _ = job.communicate(timeout=120)
    assert job.returncode == 0, out
    assert not (tmp_path / "asked").exists()


def test_a_refused_command_fails_the_job(cluster, tmp_path) -> None:
    job = submit(cluster, "precision=bf17")
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 2
    assert "precision=bf16" in out
    assert not (tmp_path / "asked").exists()
