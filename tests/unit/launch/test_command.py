"""Launcher `command` without a far side: what is rejected, and what is known of earlier workers."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from eke.common.errors import BusyError, ConfigError, EkeError
from eke.common.files import write_json
from eke.common.paths import RunPaths
from eke.launch.command import CommandLauncher, PrefixedWorker, call
from eke.launch.processes import prefix_runner
from eke.launch.processes.prefix_runner import ALIVE, BUSY, GONE, LOCK, order_digest

HERE = ["env"]
"""A prefix that stays on this machine."""


@pytest.mark.parametrize(
    ("prefix", "runs", "key"),
    [
        ([], "runs", "launcher.prefix"),
        ([""], "runs", "launcher.prefix"),
        (["ssh 'a"], "runs", "launcher.prefix"),
        (["ssh a"], "my runs", "paths.runs"),
    ],
    ids=["none", "empty", "quotes", "a path with a space"],
)
def test_invalid_launcher_prefix_is_rejected(prefix, runs, key, plan, tmp_path) -> None:
    plan.config.launcher.prefix, plan.config.paths.runs = prefix, str(tmp_path / runs)
    with pytest.raises(ConfigError) as refused:
        CommandLauncher().target(plan.config)
    assert [problem.key for problem in refused.value.problems] == [key]


@pytest.fixture
def paths(tmp_path) -> RunPaths:
    """Of a run."""
    made = RunPaths(tmp_path / "run")
    made.folder.mkdir()
    return made


def start(paths, monkeypatch, code: str, prefix=HERE) -> PrefixedWorker:
    """A worker that runs some code."""
    command = [sys.executable, "-c", code]
    monkeypatch.setattr("eke.launch.command.worker_command", lambda *_: command)
    return PrefixedWorker(paths, prefix=prefix, ticket="command.json")


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_exit_code_and_output_return_and_environment_is_clean(paths, monkeypatch, tmp_path) -> None:
    for name in ("contextlib", "json", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(66)")
    monkeypatch.chdir(tmp_path)
    for name, value in {"PYTHONPATH": ":/x", "WORLD_SIZE": "2", "WANDB_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    code = (
        "import json, os; print(os.environ['EKE_SUPERVISOR'] == str(os.getppid()), "
        "*(n for n in ('WORLD_SIZE', 'WANDB_RUN_ID', 'NCCL_DEBUG') if n in os.environ), "
        "flush=True); os._exit(7)"
    )
    worker = start(paths, monkeypatch, code)
    wait_for(worker.is_over)
    assert worker.finish() == 7
    assert paths.log.read_text() == "True NCCL_DEBUG\n"
    assert not paths.ticket("command").exists()


def test_signal_ends_the_worker_with_a_negative_exit_code(paths, monkeypatch) -> None:
    worker = start(paths, monkeypatch, "import time; time.sleep(600)")
    wait_for((paths.folder / LOCK).exists)
    wait_for(lambda: call(HERE, "check", paths.folder) == ALIVE)
    worker.ask(signal.SIGUSR1)
    wait_for(worker.is_over)
    assert worker.finish() == -signal.SIGUSR1
    assert call(HERE, "check", paths.folder) == GONE


def test_orphaned_worker_is_ended_before_the_next_start(paths, monkeypatch) -> None:
    first = start(paths, monkeypatch, "import time; time.sleep(600)")
    wait_for(lambda: call(HERE, "check", paths.folder) == ALIVE)
    first.process.kill()  # the runner
    first.process.wait()
    assert call(HERE, "check", paths.folder) == ALIVE, "its worker is still there"
    status = CommandLauncher().status([paths])[paths.folder]
    assert status.name
    assert "without a supervisor" in status.waits_for
    second = start(paths, monkeypatch, "")
    wait_for(second.is_over)
    assert second.finish() == 0


def test_unreachable_first_worker_prevents_a_second(paths, monkeypatch) -> None:
    paths.ticket("command").write_text(json.dumps({"prefix": ["false"]}))
    with pytest.raises(BusyError, match=r"delete .*command\.json"):
        start(paths, monkeypatch, "")
    assert "false" in CommandLauncher().status([paths])[paths.folder].silent
    with pytest.raises(EkeError, match="false"):
        CommandLauncher().cancel([str(paths.folder)])


def test_changed_command_file_is_not_run(paths, monkeypatch) -> None:
    ours = "eke.launch.command.write_json"
    monkeypatch.setattr(ours, lambda file, order: write_json(file, {**order, "command": ["touch"]}))
    worker = start(paths, monkeypatch, "")
    wait_for(worker.is_over)
    assert worker.finish() == BUSY
    assert "has changed the command" in paths.log.read_text()


def test_planted_lock_is_not_trusted(paths, tmp_path) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("years of work")
    order = {"command": ["true"], "environment": {}, "foreign": "R", "supervisor": "X"}
    write_json(paths.ticket("command"), order)
    lock = paths.folder / LOCK
    lock.symlink_to(thesis)
    with pytest.raises(OSError, match="symbolic"):
        prefix_runner.start(paths.folder, "command.json", order_digest(order))
    assert thesis.read_text() == "years of work"
    lock.unlink()
    with subprocess.Popen(["sleep", "600"]) as other, open(lock, "w") as held:
        print(other.pid, file=held, flush=True)
        fcntl.flock(held, fcntl.LOCK_EX)
        assert prefix_runner.worker_of(paths.folder) == 0
        lock.write_text(str(os.getpid()))
        assert prefix_runner.worker_of(paths.folder) == os.getpid(), "it holds the lock"
        other.kill()


def test_missing_prefix_program_is_named(paths, monkeypatch) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        start(paths, monkeypatch, "", prefix=["no-such-program"])
