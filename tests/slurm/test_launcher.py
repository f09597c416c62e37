"""Sweeps through a real SLURM: whatever happens to its jobs, every run is done once."""

import contextlib
import json
import os
import signal
import subprocess

import pytest
from live import SHORT, attempts, curve, record_of, single_runs
from slurm_support import CLUSTER, pids_of, wait_until
from support import PATIENCE_S, Finished, last_wins

from eke.cli import main

pytestmark = pytest.mark.slow

LONG = last_wins(
    *SHORT, "train.steps=600", "train.log_every=5", "train.checkpoint_every=50",
    "model.dropout=0.1",
)  # fmt: skip


def cells_of(tmp_path) -> list[dict]:
    (file,) = tmp_path.glob("runs/sweep-*/sweep.json")
    return json.loads(file.read_text())["cells"]


@pytest.fixture
def eke(train_main, capsys):
    """`python -m eke ...` in this process, in the folder and with the environment of its runs."""

    def run(*arguments: str) -> Finished:
        code = main(list(arguments))
        said = capsys.readouterr()
        return Finished(code, said.out, said.err)

    return run


def test_search_tries_candidates_on_nodes(cluster, eke, tmp_path) -> None:
    """Their CPUs are shared, so that one trial waits for the other."""
    cluster_alone = (word for word in CLUSTER if word != "-m")
    typed = last_wins(*cluster_alone, *SHORT, "train.steps=40", "resources.time=5")
    fixed = ("attention=sdpa", "compile=none", "kernels=none", "precision=fp32")
    done = eke("fit", *typed, *fixed, "--budget-trials", "2")
    assert done.code == 0, done.text
    assert done.out.count("submitted 1 run as job") == 2
    (report,) = tmp_path.glob("runs/sweep-*/fit.json")
    trials = json.loads(report.read_text())["trials"]
    assert [trial["outcome"] for trial in trials] == ["ok"] * 2
    # The record is written before the job has ended.
    wait_until(lambda: not cluster.ask("squeue", "--noheader"), "its jobs have ended")
    again = eke("fit", *typed, *fixed, "--budget-trials", "2")
    assert again.code == 0
    assert "submitted" not in again.out


SHELL = {
    "SBATCH_GRES": "gpu:2", "SBATCH_GPUS": "1", "SBATCH_CPUS_PER_GPU": "2", "SBATCH_BATCH": "none",
    "SBATCH_INPUT": "/nosuch", "SBATCH_EXPORT": "NONE", "SBATCH_NO_KILL": "1", "SLURM_NTASKS": "4",
    "SBATCH_PARTITION": "nosuch", "SBATCH_MEM_PER_CPU": "1T", "SLURM_EXPORT_ENV": "NONE",
    "SBATCH_EXCLUSIVE": "x", "SRUN_CPUS_PER_TASK": "3", "SLURM_PROLOG": "/nosuch",
    "SLURM_WORKING_DIR": "/nosuch", "SLURM_STDOUTMODE": "none", "SLURM_MEM_PER_NODE": "1T",
}  # fmt: skip


def test_sweep_runs_every_run_once(cluster, train_py, train_main, tmp_path, monkeypatch) -> None:
    """No variable of the shell changes what is asked for."""
    for name, value in SHELL.items():
        monkeypatch.setenv(name, value)
    typed = ("resources.partition=spot", "resources.memory=500M", "resources.gpus=0")
    command = (*CLUSTER, *SHORT, *typed, "seed=0,1,0", "resources.time=5")
    done = train_py(*command)
    assert done.code == 0, done.text
    assert [c["outcome"] for c in cells_of(tmp_path)] == ["ok"] * 3
    assert done.out.count("submitted 2 runs as job") == 1, "equal cells are one run, one array"
    again = train_main(*command)
    assert again.code == 0
    assert "submitted" not in again.out
    assert again.err.count("answered from its record") == 2
    assert not cluster.ask("squeue", "--noheader")
    told = ("--noheader", "--parsable2", "-X", "--format=Partition,ReqTRES")
    expected = ["spot|billing=1,cpu=1,mem=500M,node=1"] * 2

    def last_jobs() -> list[str]:
        return cluster.ask("sacct", *told).splitlines()[-2:]

    with contextlib.suppress(TimeoutError):  # the database is told a moment after a job ran
        wait_until(lambda: last_jobs() == expected, "sacct", timeout=30)
    assert last_jobs() == expected


def test_detached_jobs_are_found_by_the_same_command(
    cluster, train_py, train_main, eke, tmp_path, monkeypatch
) -> None:
    """Held back, they cost no time here; a controller that is down is told, and asked again."""
    held = ("slurm.options={begin: now+1hour}", "seed=0,1")
    first = train_py(*CLUSTER, *SHORT, *held, "launcher.detach=true")
    assert first.code == 0, first.text
    assert "eke status" in first.out
    second = train_main(*CLUSTER, *SHORT, *held, "launcher.detach=true")
    assert second.code == 0, second.text
    assert "submitted" not in second.out
    assert len(cluster.ask("squeue", "--noheader", "--array").splitlines()) == 2
    status = eke("status", "runs").out
    assert ": 2 queued" in status
    assert status.count(": BeginTime") == 2, status
    down = tmp_path / "down.conf"
    down.write_text(f"{cluster.conf.read_text()}\nSlurmctldPort=1\nMessageTimeout=2\n")
    monkeypatch.setenv("SLURM_CONF", str(down))
    shown = eke("status", "runs")
    assert shown.code == 1
    assert ": 2 unknown" in shown.out
    assert "slurm does not answer: squeue cannot reach a SLURM controller" in shown.out
    ended = eke("cancel", "runs")
    assert ended.code == 1
    assert ended.out.startswith("not stopped: 2 runs with a job that may wait or run: squeue")
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    (sweep,) = tmp_path.glob("runs/sweep-*")
    assert eke("cancel", str(sweep)).out == "asked 2 runs to save and end\n"
    wait_until(lambda: not cluster.ask("squeue", "--noheader"), "an empty queue")
    assert "2 not started" in eke("status", str(sweep)).out


def test_jobs_are_matched_by_submission_name(cluster, train_main, eke, tmp_path) -> None:
    """Put back by hand, and submitted once more by hand; another job is left alone."""
    other = cluster.sbatch("--begin=now+1hour", "--array=0", script="true")
    done = train_main(*CLUSTER, *LONG, "launcher.detach=true")
    assert done.code == 0, done.text
    (script,) = tmp_path.glob("runs/sweep-*/slurm/eke-*.sbatch")
    job = cluster.ask("squeue", "--noheader", "--format=%A", f"--name={script.stem}")
    cluster.wait_for(f"{job}_0", "RUNNING")
    before = cluster.job(f"{job}_0")["SubmitTime"]
    cluster.ask("scontrol", "requeuehold", f"{job}_0")
    cluster.wait_for(f"{job}_0", "PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT")
    status = eke("status", "runs").out
    assert ": 1 queued" in status, status
    assert f"job {job}_0: " in status
    assert cluster.job(f"{job}_0")["SubmitTime"] >= before
    cluster.sbatch("--begin=now+1hour", str(script))
    assert f"job {job}_0: " in eke("status", "runs").out
    assert eke("cancel", "runs").out == "asked 1 run to save and end\n"
    wait_until(
        lambda: cluster.ask("squeue", "--noheader", "--format=%A") == other, "one job is left"
    )


def test_preempted_killed_and_cancelled_run_resumes(cluster, start, tmp_path, curve_of) -> None:
    """SLURM wants the node, the run saves, its job is put back, and goes on by itself.

    kill -9 of what the job runs: the worker saves, the job fails, the run is submitted again. It
    goes on where it was; then somebody cancels its job, which is never put back.
    """
    spot = ("resources.partition=spot", "resources.gpus=2")
    live = start(*CLUSTER, *last_wins(*LONG, "tracker=wandb"), *spot)
    live.wait_for_step(50)
    blocker = cluster.sbatch("-N2", "--gres=gpu:2", "--time=5", script="sleep 3")
    cluster.wait_for(blocker, "RUNNING", "COMPLETED", timeout=PATIENCE_S)
    (folder,) = single_runs(tmp_path)
    wait_until(lambda: len(attempts(folder)) == 2, "the second attempt", PATIENCE_S)
    live.wait_for_step(len(curve(folder)) + 20)
    (watcher,) = pids_of("eke.launch.slurm.watcher", str(tmp_path))
    os.kill(watcher, signal.SIGKILL)
    wait_until(lambda: len(attempts(folder)) == 3, "the third attempt", PATIENCE_S)
    live.wait_for_step(len(curve(folder)) + 20)
    cluster.ask("scancel", "--user", str(os.getuid()))
    out = live.finish()
    assert live.process.returncode == 75, out
    assert out.count("submitted 1 run as") == 2, out
    found, record = curve(folder), record_of(folder)
    assert (record["outcome"], record["attempt"]) == ("cancelled", 2)
    assert found == curve_of(*LONG)[: len(found)]
    assert (folder / "model").exists(), "it saved first"
    assert not cluster.ask("squeue", "--noheader")
    mirrored = [each.name for each in folder.glob("wandb/offline-run-*")]
    assert len(mirrored) == 3, "a file for each attempt, of one W&B run"
    assert {name.rpartition("-")[2] for name in mirrored} == {folder.name}
    logs = [log.read_text() for log in tmp_path.glob("runs/sweep-*/slurm/*.log")]
    assert ["preempted after" in log for log in logs].count(True) == 1, logs


def test_kill_between_sbatch_and_ledger_is_recovered(
    cluster, train_py, train_main, eke, tmp_path, monkeypatch
) -> None:
    """The job is in the queue and nobody has written its number down: it is found by its name.

    So it is by another sweep that has its run, and by `eke status`.
    """
    stub = tmp_path / "bin" / "sbatch"
    stub.parent.mkdir()
    real = subprocess.run(["which", "sbatch"], capture_output=True, text=True).stdout.strip()
    stub.write_text(f'#!/bin/sh\n{real} "$@"\nkill -9 $PPID\n')
    stub.chmod(0o755)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{stub.parent}:{path}")
    command = (*CLUSTER, *SHORT, "slurm.options={begin: now+1hour}", "launcher.detach=true")
    killed = train_py(*command, "seed=0")
    assert killed.code == -signal.SIGKILL
    monkeypatch.setenv("PATH", path)
    assert "1 queued" in eke("status", "runs").out
    for typed, cells in (("seed=0,1", 2), ("seed=0", 1)):
        done = train_main(*command, typed)
        assert done.code == 0, done.text
        assert ("submitted 1 run as job" in done.out) == (cells == 2), done.out
        assert len(cluster.ask("squeue", "--noheader", "--array").splitlines()) == 2
    assert "2 queued" in eke("status", "runs").out


def test_rejected_submission_is_reported_and_cleaned_up(cluster, train_main, tmp_path) -> None:
    done = train_main(*CLUSTER, *SHORT, "resources.partition=nowhere")
    assert done.code == 1, done.text
    assert "crashed" in done.out, "there is a summary"
    assert "partition" in done.out
    assert "Traceback" not in done.text
    assert not list(tmp_path.glob("runs/sweep-*/slurm/eke-*"))
    assert not cluster.ask("squeue", "--noheader")
