"""W&B offline, with the real SDK and the real wandb-core."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from wandb_reader import WandbFile, read_wandb_file

from .conftest import (
    CHILD,
    ask,
    child_environment,
    find_cores,
    find_wandb_files,
    rows,
    start_child,
    track,
    wait_until,
)
from .stub import serving

SECRET = "5ec7e75ec7e7" + "ab" * 14


def only_file(folder: Path) -> WandbFile:
    (path,) = find_wandb_files(folder)
    return read_wandb_file(path)


def test_normal_end_is_recorded(tmp_path):
    """A process that logged 25 rows, looked at from every side."""
    folder = tmp_path / "run"
    folder.mkdir()
    environment = {
        "WANDB_API_KEY": SECRET,
        "WANDB_ERROR_REPORTING": "true",
        "WANDB_RESUME": "must",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
    }
    with serving() as server:
        child = start_child(folder, WANDB_BASE_URL=server.url, **environment)
        said = child.communicate("25\n", timeout=60)
    assert said == ("logged\nproblem: \ntelemetry: false\n", "")
    assert server.requests == []
    read = only_file(folder)
    pairs = [(row["train/global_step"], row["train/loss"]) for row in read.rows]
    assert pairs == [(step, pytest.approx(1 / step)) for step in range(1, 26)]
    assert read.step_metric == "train/global_step"
    assert read.summary["loss/train_final"] == 0.5
    assert (read.run_id, read.group) == ("0123456789abcdef", "sweep-1")
    assert (read.exit_code, read.resumed, read.is_torn) == (3, False, False)
    assert read.tags == ["cpu", "t" * 64]
    read.config.pop("_wandb")
    assert read.config == {
        "optim": "adafactor",
        "deepspeed": "zero2",
        "seed": "seven",
        "a_b": "c",
        "cfg": {"optim": {"lr": 1e-3}, "deepspeed": {"stage": 2}, "seed": 7, "path": None},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert [path.name for path in folder.iterdir()] == ["wandb"]
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert find_wandb_files(folder)[0] in files
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []


@pytest.fixture
def child(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    process = start_child(tmp_path)
    yield process
    process.kill()
    process.communicate()


def has_rows(folder: Path, count: int) -> bool:
    """Whether W&B's file, which may not have a header yet, shows so many rows or more."""
    paths = find_wandb_files(folder)
    return bool(paths) and paths[0].stat().st_size > 7 and len(only_file(folder).rows) >= count


@pytest.mark.slow
def test_kill_9_loses_at_most_the_last_interval(child, tmp_path):
    ask(child, 20)
    # The run still goes on; W&B's own interval of 15 s would not show these rows in time.
    # The last step's row stays open: an evaluation may still join it.
    wait_until(lambda: has_rows(tmp_path, 19))
    ask(child, 5)
    for pid in [child.pid, *find_cores(child.pid)]:
        os.kill(pid, signal.SIGKILL)
    child.wait()
    read = only_file(tmp_path)
    steps = [row["train/global_step"] for row in read.rows]
    assert steps == list(range(1, len(steps) + 1))
    assert 19 <= len(steps) <= 25
    assert (read.exit_code, read.config["optim"]) == (None, "adafactor")


@pytest.mark.slow
def test_death_of_wandb_core_is_survived(child, tmp_path):
    ask(child, 20)
    wait_until(lambda: has_rows(tmp_path, 19))
    cores = find_cores(child.pid)
    for pid in cores:
        os.kill(pid, signal.SIGKILL)
    ask(child, 500)
    ask(child, 500)
    stdout, stderr = child.communicate(timeout=60)
    assert len(cores) == 1
    assert child.returncode == 0
    assert stdout.startswith("problem: stopped by ConnectionResetError")
    assert "rows not mirrored" in stdout
    assert stderr.count("training goes on") == 1
    assert "Traceback" not in stderr


def test_every_run_and_attempt_has_its_own_file(make_run):
    for run_id, attempt, step in (("a" * 16, 0, 1), ("a" * 16, 1, 2), ("b" * 16, 0, 3)):
        run = make_run(run_id=run_id, attempt=attempt, factors={"precision": run_id})
        assert track(run, rows(step)).problem == ""
    reads = [read_wandb_file(path) for path in find_wandb_files(run.directory)]
    found = [(r.run_id, r.rows[0]["train/global_step"], len(r.rows), r.resumed) for r in reads]
    assert sorted(found) == [
        ("a" * 16, 1, 1, False), ("a" * 16, 2, 1, True), ("b" * 16, 3, 1, False)
    ]  # fmt: skip
    assert [r.config["precision"] for r in reads] == [r.run_id for r in reads]


def test_unwritable_folder_is_not_replaced_by_a_temporary_folder(make_run, monkeypatch, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    # Permissions do not bind root, so this is what W&B would be told.
    monkeypatch.setattr(os, "access", lambda path, mode: str(path).startswith(str(elsewhere)))
    run = make_run(directory=tmp_path / "run")
    run.directory.mkdir()
    tracker = track(run, rows(1))
    assert f"W&B cannot write to {run.directory}" in tracker.problem


@pytest.mark.slow
def test_full_disk_is_reported(tmp_path):
    # A limit on the size of files; exec keeps it for the process and for wandb-core.
    limit = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)); "
    code = limit + "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    answer = subprocess.run(
        [sys.executable, "-c", code, str(CHILD), str(tmp_path)],
        input="1000\n",
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "of 1000 rows: is the disk full?" in answer.stdout
