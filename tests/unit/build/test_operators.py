"""Locks of torch's extension builds: a left-over one is removed, one in use is waited for."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from eke.build import operators
from eke.build.operators import compiling, holder_of, wait_for_lock

HOLD = "import os, time, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(1, flush=True); "
"""What torch's FileBaton does."""


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(operators, "POLL_S", 0.01)


@pytest.fixture
def builder(tmp_path):
    """A process that holds the lock as a build does."""
    command = [sys.executable, "-S", "-c", HOLD + "time.sleep(60)", str(tmp_path / "lock")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_lock_of_a_killed_build_is_removed_aloud(builder, tmp_path, caplog) -> None:
    lock = tmp_path / "lock"
    assert holder_of(lock) == builder.pid
    os.kill(builder.pid, signal.SIGKILL)
    builder.wait()
    assert lock.exists(), "torch would wait for this one for ever"
    wait_for_lock(tmp_path)
    assert not lock.exists()
    assert str(lock) in caplog.text


def test_the_lock_of_a_build_under_way_is_waited_for(builder, tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    lock = tmp_path / "lock"
    waiting = threading.Thread(target=wait_for_lock, args=(tmp_path,))
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    lock.unlink()  # as its owner does in the end
    waiting.join(5)
    assert not waiting.is_alive()
    assert f"process {builder.pid} compiles there" in caplog.text
    assert "removed" not in caplog.text


def test_on_a_shared_disk_a_lock_counts_as_left_over_when_nothing_changed_for_long(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(operators, "file_system", lambda folder: "nfs4")
    lock = tmp_path / "lock"
    lock.touch()
    now = lock.stat().st_mtime
    assert not operators._is_left_over(tmp_path, now + operators.REMOTE_QUIET_S - 1)
    wait_for_lock(tmp_path, clock=lambda: now + operators.REMOTE_QUIET_S + 5)
    assert not lock.exists()


def test_in_a_container_other_processes_may_be_unseen(tmp_path, monkeypatch) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    now = lock.stat().st_mtime
    monkeypatch.setattr(operators, "ALL_PROCESSES", "pid:[0]")
    monkeypatch.setattr(operators, "file_system", lambda folder: "ext4")
    assert not operators._is_left_over(tmp_path, now)
    monkeypatch.setattr(operators, "file_system", lambda folder: "overlay")
    assert operators._is_left_over(tmp_path, now)


def test_who_waits_is_told_what_for(tmp_path, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(operators, "build_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(operators, "SAY_AFTER_S", 0.01)
    with compiling(("cpu_adam",)):
        time.sleep(0.2)
    assert "compiling DeepSpeed's cpu_adam in C++" in caplog.text
    assert "ready after 0 s" in caplog.text


def test_a_quick_load_is_silent(tmp_path, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(operators, "build_folder", lambda name: tmp_path / name)
    with compiling(("cpu_adam",)):
        pass
    assert caplog.text == ""


def test_other_ranks_leave_locks_alone(tmp_path, monkeypatch) -> None:
    (tmp_path / "lock").touch()
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(operators, "build_folder", lambda name: tmp_path)
    with compiling(("cpu_adam",)):
        assert (tmp_path / "lock").exists()
