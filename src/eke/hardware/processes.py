"""Processes on a device, since sharing makes timings invalid, and device slots for runs."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eke.common.paths import SUPERVISOR
from eke.hardware import nvidia
from eke.hardware.cpu import memory_available
from eke.hardware.datasheets import Device

_PROC = Path("/proc")


def has_foreign_processes(device: Device, proc: Path = _PROC) -> bool | None:
    """Return whether other processes have a CUDA context on the visible GPUs, None if unknown.

    It is unknown on a CPU, without a driver, and in a container with other process ids than the
    driver's. There every process is foreign before this process has a context.
    """
    if device.kind != "cuda":
        return None
    pids, _ = nvidia.ask_driver(
        lambda nvml: [pid for gpu in nvidia.visible_handles(nvml) for pid in _pids(nvml, gpu)]
    )
    if pids is None:
        return None
    used = set(pids)
    foreign = used - _own_processes(proc, used)
    unseen = [pid for pid in foreign if not (proc / str(pid)).exists()]
    torch = sys.modules.get("torch")
    has_context = torch is not None and torch.cuda.is_initialized()
    if unseen and os.getpid() not in used and has_context:
        return None
    return bool(foreign)


def resident_bytes(pid: int, proc: Path = _PROC) -> int:
    """Sum the resident bytes of a process and its descendants, including shared pages."""
    found = {int(entry.name): _stat(entry) for entry in proc.iterdir() if entry.name.isdecimal()}
    family, young = set[int](), {pid}
    while young:
        family |= young
        young = {child for child, (parent, _) in found.items() if parent in young} - family
    return sum(found[member][1] for member in family if member in found)


def _stat(process: Path) -> tuple[int, int]:
    """Return the parent and resident bytes of a process, zeros if it has ended."""
    try:
        # proc(5): pid (command) state ppid ...; rss is number 24, in pages. The command may contain
        # blanks and parentheses.
        fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[1]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0, 0


def _own_processes(proc: Path, candidates: set[int]) -> set[int]:
    me = os.getpid()
    ancestors = set(_ancestors(me, proc))
    # torchrun starts each rank in a new session, so ranks share only the parent.
    launcher = os.getppid() if int(os.environ.get("LOCAL_WORLD_SIZE") or 1) > 1 else None
    if launcher and os.environ.get(SUPERVISOR) == str(launcher):
        launcher, _ = _stat(proc / str(launcher))  # rank 0 of a torchrun started by the user
    return {
        pid
        for pid in candidates
        if pid == me or pid in ancestors or not {me, launcher}.isdisjoint(_ancestors(pid, proc))
    }


def _ancestors(pid: int, proc: Path) -> list[int]:
    """Return the ancestors of a process without process 1, parent first."""
    chain: list[int] = []
    while (pid := _stat(proc / str(pid))[0]) > 1 and pid not in chain:
        chain.append(pid)
    return chain


@dataclass(frozen=True)
class DeviceSlot:
    """Device for one process of a run: a GPU or a part of the CPU's cores."""

    name: str
    """Display name: `GPU 0`, `CPU 1`."""
    device: str
    """Identity of the device: UUID of a GPU, or `cpu-0`."""
    lease: str
    cores: tuple[int, ...] = ()
    """Cores of the run, empty: all cores."""

    @property
    def is_gpu(self) -> bool:
        """True if the device is a GPU or a MIG slice."""
        return self.device.startswith(("GPU-", "MIG-"))


def gpu_slots(runs_per_device: int) -> list[DeviceSlot]:
    """Return slots of the visible GPUs and MIG slices, `runs_per_device` for each."""
    uuids, _ = nvidia.ask_driver(
        lambda nvml: [str(nvml.nvmlDeviceGetUUID(each)) for each in nvidia.visible_handles(nvml)]
    )
    return [
        DeviceSlot(f"GPU {index}", uuid, uuid if not place else f"{uuid}.{place}")
        for place in range(runs_per_device)
        for index, uuid in enumerate(uuids or [])
    ]


def cpu_slots(count: int) -> list[DeviceSlot]:
    """Return slots of the CPU for `count` simultaneous runs, which divide the cores equally."""
    if count == 1:
        return [DeviceSlot("CPU", "cpu-0", "cpu-0")]
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // count)
    starts = [number * share % len(cores) for number in range(count)]
    return [
        DeviceSlot(f"CPU {n}", f"cpu-{n}", f"cpu-{n}", tuple(cores[start : start + share]))
        for n, start in enumerate(starts)
    ]


def processes_on(uuid: str) -> list[int] | None:
    """Return the processes with a CUDA context on a GPU or MIG slice, None if NVML fails."""
    return nvidia.ask_driver(lambda nvml: _pids(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)))[0]


def _pids(nvml: Any, handle: Any) -> list[int]:
    return [int(each.pid) for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]


def free_bytes(slot: DeviceSlot) -> int | None:
    """Return the free bytes of a slot's memory, None if unknown."""
    if not slot.is_gpu:
        return memory_available()

    def free(nvml: Any) -> int:
        handle = nvml.nvmlDeviceGetHandleByUUID(slot.device)
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).free)

    return nvidia.ask_driver(free)[0]
