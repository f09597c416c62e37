"""Who else uses the GPUs: a run that shares its device cannot claim a speed.

The devices of this machine that runs can be handed, one by one.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eke.common.paths import SUPERVISOR
from eke.common.text import format_bytes
from eke.hardware import nvidia
from eke.hardware.cpu import memory_available
from eke.hardware.datasheets import Device

_PROC = Path("/proc")


def foreign_processes(device: Device, proc: Path = _PROC) -> list[str] | None:
    """Processes with a CUDA context on the visible GPUs that are no part of this run.

    This process, its ancestors and descendants, and under torchrun its fellow ranks are the
    run's own.

    Args:
        device: what the run uses.
        proc: the process file system.

    Returns:
        One line each, `pid 4242 (python, 10.20 GiB)`; None when it cannot be measured: on a CPU,
        without a driver, or when the driver's process ids are a container's outside (so that this
        process's own context cannot be told from others; before it has one, all are foreign).
    """
    if device.kind != "cuda":
        return None
    used = _processes_by_pid()
    if used is None:
        return None
    own = _own_processes(proc, set(used))
    foreign = {pid: memory for pid, memory in used.items() if pid not in own}
    unseen = [pid for pid in foreign if not (proc / str(pid)).exists()]
    if unseen and os.getpid() not in used and _has_cuda_context():
        return None
    return [_describe(pid, memory, proc) for pid, memory in sorted(foreign.items())]


def resident_bytes(pid: int, proc: Path = _PROC) -> int:
    """Memory of a process and of all that it has started; what they share counts for each.

    Args:
        pid: the process; nothing is counted of one that is gone.
        proc: the process file system.
    """
    found = {int(entry.name): _stat(entry) for entry in proc.iterdir() if entry.name.isdecimal()}
    family, young = set[int](), {pid}
    while young:
        family |= young
        young = {child for child, (parent, _) in found.items() if parent in young} - family
    return sum(found[member][1] for member in family if member in found)


def _stat(process: Path) -> tuple[int, int]:
    """Parent and resident bytes of a process; zeros of one that has just ended."""
    try:
        # pid (command) state ppid ...; proc(5): rss is the 24th, in pages
        fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[1]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0, 0


def _processes_by_pid() -> dict[int, int | None] | None:
    """GPU memory in bytes by process id over all visible GPUs; None without an answer."""
    with nvidia.session() as (library, _):
        if library is None:
            return None
        used: dict[int, int | None] = {}
        try:
            for handle in nvidia.visible_handles(library, os.environ.get("CUDA_VISIBLE_DEVICES")):
                for process in library.nvmlDeviceGetComputeRunningProcesses(handle):
                    memory: Any = process.usedGpuMemory  # None where the driver does not say
                    before = used.get(process.pid)
                    used[process.pid] = before if memory is None else (before or 0) + memory
        except library.NVMLError:
            return None
        return used


def _own_processes(proc: Path, candidates: set[int]) -> set[int]:
    """Those of `candidates` that belong to this run."""
    me = os.getpid()
    ancestors = set(_ancestors(me, proc))
    # torchrun starts every rank in a session of its own, as its child: only the parent is shared
    launcher = None
    if int(os.environ.get("LOCAL_WORLD_SIZE") or 1) > 1:
        launcher = os.getppid()
        if os.environ.get(SUPERVISOR) == str(launcher):  # of rank 0 under a hand-typed torchrun
            launcher = _parent(launcher, proc)
    return {
        pid
        for pid in candidates
        if pid == me or pid in ancestors or not {me, launcher}.isdisjoint(_ancestors(pid, proc))
    }


def _ancestors(pid: int, proc: Path) -> list[int]:
    """Parent, grandparent and so on up to, not including, process 1."""
    chain: list[int] = []
    while (pid := _parent(pid, proc)) > 1 and pid not in chain:
        chain.append(pid)
    return chain


def _parent(pid: int, proc: Path) -> int:
    """Parent's process id; 0 when the process is gone or not in this namespace."""
    try:
        stat = (proc / str(pid) / "stat").read_text(errors="replace")
        # pid (command) state ppid ...; the command may hold blanks and parentheses
        return int(stat.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _has_cuda_context() -> bool:
    """Whether torch, if this process has imported it at all, has touched a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _describe(pid: int, memory: int | None, proc: Path) -> str:
    """One process in words."""
    try:
        name = (proc / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        name = "outside this container"
    return f"pid {pid} ({name}{f', {format_bytes(memory)}' if memory else ''})"


@dataclass(frozen=True)
class DeviceSlot:
    """A place for one process of a run: a GPU, or a share of the CPU's cores."""

    name: str
    """As a table shows it: `GPU 0`, `CPU 1`."""
    device: str
    """What two slots of one device have in common: a GPU's UUID, or `cpu-0`."""
    lease: str
    """Name of its lock on this machine."""
    cores: tuple[int, ...] = field(default=())
    """Cores a run is held to; empty where it may use all."""

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU or a slice of one, whose UUIDs start so."""
        return self.device.startswith(("GPU-", "MIG-"))


def gpu_slots(runs_per_device: int) -> list[DeviceSlot]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, by UUID; slices (MIG) have their own.

    Args:
        runs_per_device: how many runs may share a GPU.
    """
    with nvidia.session() as (library, _):
        if library is None:
            return []
        try:
            handles = nvidia.visible_handles(library, os.environ.get("CUDA_VISIBLE_DEVICES"))
            uuids = [str(library.nvmlDeviceGetUUID(handle)) for handle in handles]
        except library.NVMLError:
            return []
    return [
        DeviceSlot(f"GPU {index}", uuid, uuid if not place else f"{uuid}.{place}")
        for place in range(runs_per_device)
        for index, uuid in enumerate(uuids)
    ]


def cpu_slots(count: int) -> list[DeviceSlot]:
    """This machine's CPU in equal parts of its cores.

    Args:
        count: runs at once. One leaves all cores to a run; more hold each to cores of its own, as
            far as there are any.
    """
    if count == 1:
        return [DeviceSlot("CPU", "cpu-0", "cpu-0")]
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // count)
    return [
        DeviceSlot(f"CPU {n}", f"cpu-{n}", f"cpu-{n}", tuple(_share_of(cores, n, share)))
        for n in range(count)
    ]


def _share_of(cores: list[int], number: int, share: int) -> list[int]:
    start = number * share % len(cores)
    return cores[start : start + share]


def processes_on(uuid: str) -> list[int] | None:
    """Processes with a CUDA context on a GPU, or a slice of one; None without an answer."""
    with nvidia.session() as (library, _):
        if library is None:
            return None
        try:
            handle = library.nvmlDeviceGetHandleByUUID(uuid)
            return [int(p.pid) for p in library.nvmlDeviceGetComputeRunningProcesses(handle)]
        except library.NVMLError:
            return None


def free_bytes(slot: DeviceSlot) -> int | None:
    """Bytes of a slot's memory that nobody holds now; None where nobody tells."""
    if not slot.is_gpu:
        return memory_available()
    with nvidia.session() as (library, _):
        if library is None:
            return None
        try:
            handle = library.nvmlDeviceGetHandleByUUID(slot.device)
            return int(library.nvmlDeviceGetMemoryInfo(handle).free)
        except library.NVMLError:
            return None
