"""A machine with the GPUs a test asks for: NVML replaced by what the driver would answer."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from eke.hardware.cpu import TorchBuild

MIB = 2**20

detect_module = importlib.import_module("eke.hardware.cpu")  # its function has the same name


class NVMLError(Exception):
    """What pynvml raises for every failure."""


@dataclass
class FakeGpu:
    """One GPU as the driver describes it; None stands for a question it does not answer."""

    name: str
    uuid: str
    memory_mib: int | None = 81920
    capability: tuple[int, int] | None = (8, 0)
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    reserved_mib: int | None = None
    """What the driver keeps; None: an older driver, which does not tell."""
    parent: str = ""
    """UUID of the GPU that this is a slice of."""


class FakeNvml:
    """The part of `pynvml` that eke uses."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 0x2000028

    def __init__(self, gpus: list[FakeGpu], broken: str, slices: list[FakeGpu]) -> None:
        self.gpus, self.broken, self.slices = gpus, broken, slices
        self.sliced: set[str] = set()
        """UUIDs of the GPUs in MIG mode, which may have no slice."""
        self.open_sessions = 0

    def nvmlInit(self) -> None:
        if self.broken == "init":
            raise NVMLError("Driver/library version mismatch")
        self.open_sessions += 1

    def nvmlShutdown(self) -> None:
        self.open_sessions -= 1

    def nvmlDeviceGetCount(self) -> int:
        if self.broken == "count":
            raise NVMLError("Unknown Error")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for piece in [*self.gpus, *self.slices]:
            if piece.uuid == uuid:
                return piece
        raise NVMLError("Not Found")

    def nvmlDeviceIsMigDeviceHandle(self, gpu: FakeGpu) -> int:
        return int(gpu in self.slices)

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        if gpu in self.slices:
            raise NVMLError("Not Supported")
        return [int(gpu.uuid in self.sliced), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, number: int) -> FakeGpu:
        of_it = {2 * n: each for n, each in enumerate(self.slices) if each.parent == gpu.uuid}
        if number not in of_it:
            raise NVMLError("Not Found")
        return of_it[number]

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int = 0) -> SimpleNamespace:
        if gpu.memory_mib is None:
            raise NVMLError("Not Supported")
        if version and gpu.reserved_mib is None:
            raise NVMLError("Function Not Found")
        total = gpu.memory_mib * MIB
        used = sum(n or 0 for _, n in gpu.processes)
        reserved = (gpu.reserved_mib or 0) * MIB
        return SimpleNamespace(total=total, free=total - used, used=used, reserved=reserved)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> tuple[int, int]:
        if gpu.capability is None:
            raise NVMLError("Not Supported")
        return gpu.capability

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes]

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        return 41

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return 99_500

    def nvmlDeviceGetPowerManagementLimit(self, gpu: FakeGpu) -> int:
        return 700_000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:
        return 0x1 | 0x4 | 0x40

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13010


Machine = Callable[..., FakeNvml]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """`machine("NVIDIA H200", ...)`: a machine with these GPUs and a CUDA build of torch."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(detect_module, "torch_build", lambda: TorchBuild("2.13.0", "13.0"))

    def make(*names: str, broken: str = "", slices: Any = (), **facts: Any) -> FakeNvml:
        gpus = [
            FakeGpu(name, f"GPU-{index}a7f-{index}", **facts) for index, name in enumerate(names)
        ]
        fake = FakeNvml(gpus, broken, [FakeGpu(*piece) for piece in slices])
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return make
