"""The devices of this machine that runs can be handed, one by one."""

import os
from dataclasses import dataclass, field

from eke.hardware import nvml
from eke.hardware.cpu import memory_available


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
    with nvml.session() as (library, _):
        if library is None:
            return []
        try:
            handles = nvml.visible_handles(library, os.environ.get("CUDA_VISIBLE_DEVICES"))
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
    with nvml.session() as (library, _):
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
    with nvml.session() as (library, _):
        if library is None:
            return None
        try:
            handle = library.nvmlDeviceGetHandleByUUID(slot.device)
            return int(library.nvmlDeviceGetMemoryInfo(handle).free)
        except library.NVMLError:
            return None
