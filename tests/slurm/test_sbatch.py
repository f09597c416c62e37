"""slurm/train.sbatch as bash runs it, with SLURM's commands and `train.py` played by stubs."""

import os
import subprocess

import pytest
from support import REPO

STUBS = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
    "python": 'echo "$@" >started\nexit $CODE',
    "scontrol": '[ "$1" = show ] && echo "JobState=$STATE" || echo "$@" >asked',
    "sleep": "",
}


@pytest.mark.parametrize(
    ("code", "state", "asked"),
    [
        pytest.param(0, "RUNNING", None, id="finished"),
        pytest.param(2, "RUNNING", None, id="refused"),
        pytest.param(75, "RUNNING", "requeue 7_3\n", id="interrupted"),
        pytest.param(75, "COMPLETING", None, id="cancelled"),
    ],
)
def test_only_interrupted_run_is_requeued(code, state, asked, tmp_path) -> None:
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    own = {"SLURM_SUBMIT_DIR": str(tmp_path), "PYTHON": "python", "CODE": str(code), "STATE": state}
    path = f"{tmp_path}:{os.environ['PATH']}"
    script = str(REPO / "slurm" / "train.sbatch")
    done = subprocess.run(["bash", script, "a=b c"], env={**job, **own, "PATH": path}, cwd="/")
    assert done.returncode == code
    assert (tmp_path / "started").read_text() == "train.py a=b c\n"
    told = tmp_path / "asked"
    assert (told.read_text() if told.exists() else None) == asked
