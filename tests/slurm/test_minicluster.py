"""The cluster that slurm/minicluster starts does what launchers rely on."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from slurm_support import (
    SCAN_S,
    Cluster,
    NoClusterError,
    minicluster,
    processes_of,
    processes_with,
    start,
    wait_until,
)

pytestmark = pytest.mark.slow  # a real SLURM

NOTES_SIGNALS = """\
#!/usr/bin/env python3
import os, signal, sys, time

def note(what):
    with open(sys.argv[1], "a") as notes:
        notes.write(what + "\\n")

for name in ("USR2", "TERM"):
    signal.signal(getattr(signal, "SIG" + name), lambda number, _, n=name: note(n))
note("start " + os.environ.get("SLURM_RESTART_COUNT", "0"))
restarted = "SLURM_RESTART_COUNT" in os.environ
time.sleep(0.1 if restarted else 600)
note("end")
"""


def lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def test_jobs_get_separate_gpus(cluster: Cluster, tmp_path: Path) -> None:
    script = "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES; sleep 2"
    arguments = ("--nodes=1", "--gpus-per-node=1", f"--output={tmp_path}/%j")
    jobs = [cluster.sbatch(*arguments, script=script) for _ in range(4)]
    assert {cluster.wait_for(job, "COMPLETED", "FAILED") for job in jobs} == {"COMPLETED"}
    seen = sorted((tmp_path / job).read_text().split() for job in jobs)
    assert [node for node, _ in seen] == ["n1", "n1", "n2", "n2"]
    assert seen[0] != seen[1]
    assert seen[2] != seen[3]


def test_array_tasks_are_accounted_for(cluster: Cluster, tmp_path: Path) -> None:
    arguments = ("--array=0-3", "--nodes=1", f"--output={tmp_path}/%a", "--gpus-per-node=1")
    job = cluster.sbatch(*arguments, script="echo $SLURM_ARRAY_TASK_ID; exit $SLURM_ARRAY_TASK_ID")
    for task in range(4):
        cluster.wait_for(f"{job}_{task}", "FAILED" if task else "COMPLETED")
        assert (tmp_path / str(task)).read_text() == f"{task}\n"
    told = ("-X", "--parsable2", "--noheader", "--format=JobID,State,ExitCode")
    expected = [f"{job}_{task}|{'FAILED' if task else 'COMPLETED'}|{task}:0" for task in range(4)]

    def rows() -> list[str]:
        return sorted(cluster.ask("sacct", f"--jobs={job}", *told).split())

    # The database is told a moment later: at first there is one row, without its task's number.
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: rows() == expected, "sacct", timeout=30)
    assert rows() == expected


def test_preempted_job_is_requeued_and_time_limit_signals(cluster: Cluster, tmp_path: Path) -> None:
    """Both at once, since SLURM looks at limits and graces only twice a minute."""
    program = tmp_path / "program"
    program.write_text(NOTES_SIGNALS)
    program.chmod(0o755)
    node = ("--nodelist=n1", "--gpus-per-node=2", f"--output={tmp_path}/%j.out")
    half = ("--nodelist=n2", "--gpus-per-node=1", f"--output={tmp_path}/%j.out", "--time=1")
    spot = cluster.sbatch("--partition=spot", *node, str(program), str(tmp_path / "spot"))
    batch = cluster.sbatch("--signal=B:USR2@60", *half, str(program), str(tmp_path / "batch"))
    step = cluster.sbatch("--signal=USR2@60", *half, script=f"srun {program} {tmp_path}/step")
    cluster.wait_for(spot, "RUNNING")
    assert cluster.job(spot)["PreemptTime"] == "None"
    urgent = cluster.sbatch(*node, script="sleep 1")

    cluster.wait_for(spot, "COMPLETING", "PENDING", timeout=2 * SCAN_S)
    assert cluster.job(spot)["Restarts"] == "1"
    cluster.wait_for(urgent, "COMPLETED")
    cluster.wait_for(spot, "COMPLETED")
    notes = lines_of(tmp_path / "spot")
    assert notes == ["start 0", "TERM", "start 1", "end"]
    # With B: the script is warned, without it the steps of srun.
    for job, name in ((batch, "batch"), (step, "step")):
        notes = tmp_path / name
        wait_until(lambda file=notes: len(lines_of(file)) > 1, f"a warning of {name}", 2 * SCAN_S)
        assert lines_of(notes)[:2] == ["start 0", "USR2"]
        assert cluster.state(job) == "RUNNING"


def test_minicluster_stops_cleanly_and_restarts_after_kill(tmp_path: Path) -> None:
    """In a cluster of its own, without accounting."""
    folder = tmp_path / "c"
    try:
        own = start(folder, "--no-accounting", MINICLUSTER_CONF="KillWait=2")
    except NoClusterError as error:
        if os.environ.get("EKE_CI"):
            raise
        pytest.skip(f"no SLURM here: {error}")
    try:
        mark = f"9{os.getpid()}"  # seconds that no other process sleeps
        script = f"sleep {mark} & env -u SLURM_CONF sleep {mark}"
        job = own.sbatch("--gpus-per-node=1", "--output=/dev/null", script=script)
        own.wait_for(job, "RUNNING")
        assert own.ask("scontrol", "show", "config").count("KillWait                = 2 sec") == 1
        wait_until(lambda: len(processes_with(f"sleep\0{mark}", "cmdline")) == 2, "its sleeps")
        running = len(processes_of(folder))
        again = minicluster("up", str(folder), "--no-accounting")
        assert again.stdout == f"export SLURM_CONF={own.conf}\n"
        assert len(processes_of(folder)) == running
        for name in ("slurmctld", "slurmd-n1", "munged"):
            os.kill(int((folder / "run" / f"{name}.pid").read_text()), signal.SIGKILL)
        assert minicluster("status", str(folder)).returncode == 3

        start(folder, "--no-accounting")
        assert own.ask("squeue", "--noheader") == ""
        assert processes_with(f"sleep\0{mark}", "cmdline") == []
        assert minicluster("status", str(folder)).returncode == 0
    finally:
        down = minicluster("down", str(folder))
    assert down.returncode == 0, down.stderr
    assert processes_of(folder) == []
    assert not folder.exists()


def test_minicluster_rejects_foreign_folders_and_commands(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "slurm.conf").touch()
    real = minicluster("up", str(tmp_path / "c"), SLURM_CONF=str(theirs / "slurm.conf"))
    assert real.returncode == 1
    assert "names a real SLURM" in real.stderr
    for verb in ("up", "down"):
        assert minicluster(verb, str(theirs)).returncode == 1
    assert (theirs / "slurm.conf").exists()
    assert minicluster("sideways").returncode == 2
