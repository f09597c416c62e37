"""slurm/train.sbatch on a real SLURM, from submission to the record of the requeued run."""

import sys
from pathlib import Path

import pytest
from live import SHORT, record_of, rows_of, run_folders
from slurm_support import Cluster, wait_until
from support import PATIENCE_S, REPO, environment, last_wins

pytestmark = pytest.mark.slow  # a real SLURM


@pytest.fixture
def submit_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from; jobs inherit the environment of a fresh user."""
    (tmp_path / "train.py").symlink_to(REPO / "train.py")
    for name, value in {**environment(tmp_path), "PYTHON": sys.executable}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_warned_job_is_requeued_and_ends_in_the_same_folder(
    cluster: Cluster, submit_folder: Path
) -> None:
    overrides = last_wins(*SHORT, "hardware=cpu", "train.steps=300", "train.log_every=5")
    options = ("--nodes=1", "--gpus-per-node=1", "--time=30", "--output=job.out")
    job = cluster.sbatch(*options, str(REPO / "slurm" / "train.sbatch"), *overrides)

    def steps() -> list[int]:
        files = submit_folder.glob("runs/*/metrics.jsonl")
        return [row["train/global_step"] for file in files for row in rows_of(file.parent)]

    wait_until(lambda: max(steps(), default=0) >= 20, "step 20", PATIENCE_S)
    # Exactly what `--signal=USR2@120` does two minutes before the end, without the wait for it.
    cluster.ask("scancel", "--signal=USR2", job)
    wait_until(lambda: cluster.job(job)["Restarts"] == "1", "the requeue", PATIENCE_S)
    (folder,) = run_folders(submit_folder)
    assert record_of(folder)["outcome"] == "timeout"

    cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", timeout=PATIENCE_S)
    assert cluster.state(job) == "COMPLETED", (submit_folder / "job.out").read_text()
    assert run_folders(submit_folder) == [folder]
    record = record_of(folder)
    assert record["outcome"] == "ok"
    assert max(steps()) == 300
    assert len((folder / "attempts.jsonl").read_text().splitlines()) == 2
