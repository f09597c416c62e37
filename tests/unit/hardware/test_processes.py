"""Who shares the GPU: only processes that are no part of the run."""

import os
import sys
from types import SimpleNamespace

import pytest

from eke.hardware import DEVICES, has_foreign_processes, resident_bytes
from eke.hardware.cpu import cpu_device

GPU = DEVICES["h200"]
ME, LAUNCHER = os.getpid(), os.getppid()
SHELL, RANK, CHILD, OTHER = 900001, 900002, 900003, 900004
MIB = 2**20


@pytest.fixture
def proc(tmp_path):
    """A process table: shell > launcher > (this process > child, rank), and somebody else."""
    parents = {ME: LAUNCHER, LAUNCHER: SHELL, SHELL: 1, RANK: LAUNCHER, CHILD: ME, OTHER: SHELL}
    for pid, parent in parents.items():
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (a ) b) S {parent} {'0 ' * 20}\n")
        (folder / "comm").write_text("python\n")
    return tmp_path


@pytest.fixture
def gpu(machine, monkeypatch):
    """`gpu((pid, bytes), ...)`: one GPU with these processes on it."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def make(*processes):
        return machine("NVIDIA H200", processes=list(processes))

    return make


@pytest.mark.parametrize(
    ("processes", "foreign"),
    [
        ([(ME, MIB), (CHILD, MIB), (LAUNCHER, None)], False),
        ([(ME, MIB), (OTHER, 2048 * MIB)], True),
    ],
    ids=["the run itself", "another user's"],
)
def test_foreign_processes_are_detected(processes, foreign, gpu, proc):
    gpu(*processes)
    assert has_foreign_processes(GPU, proc) is foreign


def test_sibling_is_a_rank_only_under_torchrun(gpu, proc, monkeypatch):
    gpu((RANK, MIB))
    assert has_foreign_processes(GPU, proc) is True
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert has_foreign_processes(GPU, proc) is False


def test_launcher_of_a_supervised_run_is_the_grandparent(gpu, proc, monkeypatch):
    """A hand-typed torchrun starts train.py, and that starts the worker of rank 0."""
    gpu((OTHER, MIB))  # a child of the shell, which stands for torchrun here
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert has_foreign_processes(GPU, proc) is True
    monkeypatch.setenv("EKE_SUPERVISOR", str(LAUNCHER))
    assert has_foreign_processes(GPU, proc) is False


def test_only_visible_gpus_are_checked(machine, proc, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    fake = machine("NVIDIA H200", "NVIDIA H200", "NVIDIA H200")
    for gpu in fake.gpus[1:]:
        gpu.processes = [(OTHER, MIB)]
    for visible, foreign in (("0", False), ("1", True), ("0,1,2", True)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert has_foreign_processes(GPU, proc) is foreign


def test_container_is_measurable_only_before_own_context(gpu, proc, monkeypatch):
    gpu((123456789, MIB))
    idle = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", idle)
    assert has_foreign_processes(GPU, proc) is True
    busy = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", busy)
    assert has_foreign_processes(GPU, proc) is None


def test_cpu_or_silent_driver_is_not_measurable(machine, proc):
    for broken in ("init", "count"):
        machine("NVIDIA H200", broken=broken)
        assert has_foreign_processes(GPU, proc) is None, broken
    machine("NVIDIA H200", processes=[(OTHER, MIB)])
    assert has_foreign_processes(cpu_device(), proc) is None


def test_resident_bytes_include_child_processes(proc):
    pages = {LAUNCHER: 5, ME: 7, CHILD: 11, RANK: 13, OTHER: 17}
    for pid, count in pages.items():
        line = (proc / str(pid) / "stat").read_text()
        start = " ".join(line.split()[:-1])  # rss is the 24th
        (proc / str(pid) / "stat").write_text(f"{start} {count}\n")
    size = os.sysconf("SC_PAGE_SIZE")
    assert resident_bytes(ME, proc) == (7 + 11) * size
    assert resident_bytes(LAUNCHER, proc) == (5 + 7 + 11 + 13) * size
    assert resident_bytes(999999, proc) == 0, "it is gone"


def test_resident_bytes_of_this_process_are_plausible():
    assert resident_bytes(ME) > MIB
