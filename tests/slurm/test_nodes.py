"""Runs on two nodes of a real SLURM: the same numbers as on one, whatever happens to either."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from live import SHORT, attempts, curve, record_of, run_folders, run_in, single_runs
from rank_server import RankServer
from slurm_support import CLUSTER, Cluster, pids_of, wait_until
from support import PATIENCE_S, REPO, environment, last_wins
from trained_ranks import undisturbed_curve

from eke.config.compose import compose
from eke.workflows.planning import plan_for

pytestmark = pytest.mark.slow  # a real SLURM

RANKS = last_wins(
    *SHORT, "train.steps=240", "train.log_every=5", "train.checkpoint_every=50",
    "model.dropout=0.1", "distributed=ddp", "distributed.num_processes=2",
)  # fmt: skip

NODES = (*RANKS, "distributed.num_nodes=2")


@pytest.fixture(scope="module")
def on_one_machine(rank_server: RankServer, tmp_path_factory) -> list[tuple[float, float]]:
    """The curve of two processes on this machine, never interrupted."""
    plan = plan_for(compose([*RANKS, "hardware=cpu"]), False)
    return undisturbed_curve(rank_server, plan, tmp_path_factory.mktemp("one"))


def run_of(tmp_path: Path) -> Path:
    (folder,) = single_runs(tmp_path)
    return folder


def test_two_node_run_resumes_the_same_curve_after_any_loss(
    cluster: Cluster, start, tmp_path: Path, on_one_machine
) -> None:
    """SLURM wants the nodes back; then a process of the second one is killed, then its watcher."""
    live = start(*CLUSTER, *NODES, "resources.partition=spot", "resources.gpus=2")
    live.wait_for_step(50)
    blocker = cluster.sbatch("-N2", "--gres=gpu:2", "--time=5", script="sleep 3")
    cluster.wait_for(blocker, "RUNNING", "COMPLETED", timeout=PATIENCE_S)
    folder = run_of(tmp_path)
    wait_until(lambda: len(attempts(folder)) == 2, "the second attempt", PATIENCE_S)
    live.wait_for_step(110)
    (agent,) = pids_of("eke.training.loop.agent", str(tmp_path), " 1 2 ")
    (worker,) = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    wait_until(lambda: len(attempts(folder)) == 3, "the third attempt", PATIENCE_S)
    assert len(list(tmp_path.glob("runs/sweep-*/slurm/*.log"))) == 1, "in the same job"
    live.wait_for_step(190)
    watchers = pids_of("eke.launch.slurm.watcher", str(tmp_path))
    (other,) = [pid for pid in watchers if variable(pid, "SLURM_PROCID") == "1"]
    os.kill(other, signal.SIGKILL)
    out = live.finish()
    assert live.process.returncode == 0, out
    assert out.count("submitted 1 run as") == 2, "the job has failed, and the run goes on"
    assert curve(folder) == on_one_machine
    assert len(attempts(folder)) == 4
    assert record_of(folder)["plan"]["batch"]["world_size"] == 2
    assert not (folder / "nodes.json").exists()
    log = "".join(f.read_text() for f in tmp_path.glob("runs/sweep-*/slurm/*.log"))
    assert "preempted after" in log
    assert "crashed after" in log


def test_first_node_that_cannot_start_ends_the_job(cluster: Cluster, start, tmp_path) -> None:
    """No Python there, say: nobody invites the second node, which would wait for half an hour."""
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\n[ "$SLURM_NODEID" = 0 ] && exit 127\nexec "$@"\n')
    broken.chmod(0o755)
    live = start(*CLUSTER, *NODES, f"slurm.command_prefix={broken}", "slurm.srun=['--wait=3']")
    out = live.finish()
    assert live.process.returncode == 1, out
    (log,) = {path: path.read_text() for path in tmp_path.glob("runs/sweep-*/slurm/*.log")}.values()
    assert "cannot reach" not in log, "it was ended, and did not give up"


def variable(pid: int, name: str) -> str:
    """A variable of a process's environment."""
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = [w.decode().partition("=")[2] for w in words if w.startswith(f"{name}=".encode())]
    return found[0] if found else ""


def test_sbatch_script_runs_on_two_nodes(
    cluster: Cluster, tmp_path: Path, monkeypatch, on_one_machine
) -> None:
    (tmp_path / "train.py").symlink_to(REPO / "train.py")
    for name, value in {**environment(tmp_path), "PYTHON": sys.executable}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    script = str(REPO / "slurm" / "train.sbatch")
    job = cluster.sbatch(
        "--nodes=2", "--time=30", "--output=job.out", script, *NODES, "hardware=cpu"
    )
    wait_until(lambda: list(tmp_path.glob("runs/*/metrics.jsonl")), "a step", PATIENCE_S)
    folder = run_of(tmp_path)
    wait_until(lambda: len(curve(folder)) >= 50, "step 50", PATIENCE_S)
    cluster.ask("scancel", "--signal=USR2", job)  # as `--signal` does before the limit
    wait_until(lambda: cluster.job(job)["Restarts"] == "1", "the requeue", PATIENCE_S)
    assert record_of(folder)["outcome"] == "timeout"
    cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", timeout=PATIENCE_S)
    assert cluster.state(job) == "COMPLETED", (tmp_path / "job.out").read_text()
    assert run_folders(tmp_path) == [folder]
    assert curve(folder) == on_one_machine
    assert not list(tmp_path.glob("runs/.nodes*"))
    out = (tmp_path / "job.out").read_text()
    assert out.count(f"run     {folder.name}") == 2, "one of the two tasks speaks, before and after"


def test_one_node_resumes_a_two_node_run(
    cluster: Cluster, tmp_path: Path, monkeypatch, rank_server
) -> None:
    (tmp_path / "train.py").symlink_to(REPO / "train.py")
    for name, value in {**environment(tmp_path), "PYTHON": sys.executable}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    case = last_wins(*NODES, "model.dropout=0", "distributed=fsdp", "optimizer.lr=1e-5")
    script = str(REPO / "slurm" / "train.sbatch")
    job = cluster.sbatch("--nodes=2", "--time=30", script, *case, "hardware=cpu")
    wait_until(lambda: list(tmp_path.glob("runs/*/metrics.jsonl")), "a step", PATIENCE_S)
    folder = run_of(tmp_path)
    wait_until(lambda: len(curve(folder)) >= 50, "step 50", PATIENCE_S)
    cluster.ask("scancel", job)
    cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", timeout=PATIENCE_S)
    assert record_of(folder)["steps_done"] < 240
    rest = f"train.resume={folder}", "distributed=none", "batch.accumulation=2"
    done = run_in(tmp_path, ["srun", "--ntasks=1", sys.executable, "train.py", *rest])
    assert done.code == 0, done.text
    assert run_folders(tmp_path) == [folder]
    assert record_of(folder)["outcome"] == "ok"
    one = last_wins(
        *RANKS,
        "model.dropout=0",
        "distributed=none",
        "distributed.num_processes=1",
        "batch.per_device=8",
    )
    plan = plan_for(compose([*one, "optimizer.lr=1e-5", "hardware=cpu"]), False)
    expected = undisturbed_curve(rank_server, plan, tmp_path / "one")
    found = [loss for loss, _ in curve(folder)]
    # Losses are near 5, where float32 has steps of 5e-7.
    assert found == pytest.approx([loss for loss, _ in expected], abs=2e-6)


def test_surplus_srun_task_is_rejected_once(cluster: Cluster, tmp_path: Path) -> None:
    done = subprocess.run(
        ["srun", "--ntasks=2", sys.executable, str(REPO / "train.py"), *RANKS, "hardware=cpu"],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 2, done
    told = " ".join(done.stderr.split())
    assert told.count("srun started 2 tasks, and a run needs one task per node") == 1
    assert not (tmp_path / "runs").exists()
