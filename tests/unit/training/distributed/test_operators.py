"""Builds of torch's extensions: nobody waits for a process that is gone."""

import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from torch.utils import cpp_extension

from eke.training.distributed import build_operators
from eke.training.distributed.build_operators import FOLDER, BuildLock, build_folder, compiling

HOLD = (
    "import sys, time; from eke.training.distributed.build_operators import BuildLock; "
    "turn = BuildLock(sys.argv[1]); turn.try_acquire(); print(1, flush=True); time.sleep(60)"
)


@pytest.fixture
def builder(tmp_path):
    """A process that builds."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.slow
def test_torch_lock_outlives_a_killed_build(tmp_path) -> None:
    """What all of this is for: a new torch in which it is not needed fails here."""
    lock = tmp_path / "lock"
    code = (
        "import os, sys; from torch.utils.file_baton import FileBaton; "
        "FileBaton(sys.argv[1]).try_acquire(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(lock)], check=False)
    assert lock.exists()
    assert not cpp_extension.FileBaton(str(lock)).try_acquire()


@pytest.mark.slow
def test_killed_build_releases_its_lock(builder, tmp_path) -> None:
    got = threading.Event()

    def take() -> None:
        turn = BuildLock(str(tmp_path / "lock"))
        assert turn.try_acquire()
        got.set()
        turn.release()

    waiting = threading.Thread(target=take)
    waiting.start()
    assert not got.wait(0.2), "two built at once"
    os.kill(builder.pid, signal.SIGKILL)
    assert got.wait(30)
    waiting.join()


def test_stale_torch_lock_file_is_ignored(tmp_path) -> None:
    (tmp_path / "lock").touch()
    turn = BuildLock(str(tmp_path / "lock"))
    assert turn.try_acquire()
    turn.release()


def test_torch_locking_is_restored(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    torchs = cpp_extension.FileBaton
    with compiling("an operator"):
        assert cpp_extension.FileBaton is BuildLock
        inside = os.environ[FOLDER]
    assert inside.startswith(f"{tmp_path}/")
    assert cpp_extension.FileBaton is torchs
    assert os.environ[FOLDER] == str(tmp_path)
    monkeypatch.delenv(FOLDER)
    with pytest.raises(ZeroDivisionError), compiling("an operator"):
        raise ZeroDivisionError
    assert FOLDER not in os.environ


def test_each_processor_has_its_own_build_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    here = build_folder()
    monkeypatch.setattr(build_operators, "cpu_name", lambda: "another one")
    assert build_folder() != here


def test_slow_compilation_is_logged(tmp_path, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with compiling("DeepSpeed's Adam"):
        pass
    assert caplog.text == "", "a quick load is silent"
    monkeypatch.setattr(build_operators, "SAY_AFTER_S", 0.01)
    with compiling("DeepSpeed's Adam"):
        time.sleep(0.2)
    assert "compiling DeepSpeed" in caplog.text
    assert "ready after 0 s" in caplog.text


def test_processor_is_read_once(monkeypatch) -> None:
    calls: list[int] = []
    cpuinfo = importlib.import_module("cpuinfo")
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: calls.append(1) or {"arch": "X86_64"})
    for _ in range(2):
        build_operators.read_processor_once()
        assert cpuinfo.get_cpu_info()["arch"] == "X86_64"
    assert len(calls) == 1
