"""What is read of GPUs, from a driver that answers what it is told to."""

import sys
from types import SimpleNamespace

import pytest

from eke.hardware.nvidia import report_gpus

GIB = 2**30


class NVMLError(Exception):
    """What pynvml raises for every failure."""


class TwoGpus:
    """`pynvml` on a machine of two H100."""

    NVMLError = NVMLError

    def __init__(self, *silent: str):
        self.silent = silent

    def __getattribute__(self, name):
        if name.startswith("nvml") and name in super().__getattribute__("silent"):
            raise AttributeError(name)
        return super().__getattribute__(name)

    def nvmlInit(self):
        """Nothing to do."""

    def nvmlShutdown(self):
        """Nothing to do."""

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlSystemGetDriverVersion(self):
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 13010

    def nvmlDeviceGetName(self, gpu):
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(total=80 * GIB, used=2 * GIB)

    def nvmlDeviceGetCudaComputeCapability(self, gpu):
        return (9, 0)

    def nvmlDeviceIsMigDeviceHandle(self, gpu):
        return 0

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        return 41 + gpu

    def nvmlDeviceGetPowerUsage(self, gpu):
        return 99_500

    def nvmlDeviceGetPowerManagementLimit(self, gpu):
        return 700_000

    def nvmlDeviceGetClockInfo(self, gpu, which):
        return 1200

    def nvmlDeviceGetMaxClockInfo(self, gpu, which):
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu):
        return 0x1 | 0x4 | 0x40

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return SimpleNamespace(gpu=7)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return [SimpleNamespace(pid=1, usedGpuMemory=None)] * gpu


@pytest.fixture
def driver(monkeypatch):
    """`driver(*silent)`: the machine has these GPUs, and its library lacks some functions."""

    def install(*silent):
        monkeypatch.setitem(sys.modules, "pynvml", TwoGpus(*silent))

    return install


def test_what_the_driver_tells(driver) -> None:
    driver()
    report = report_gpus()
    assert (report.absent, report.driver, report.cuda_driver) == ("", "580.65.06", "13.1")
    first, second = report.gpus
    assert (first.memory_bytes, first.used_bytes) == (80 * GIB, 2 * GIB)
    assert (first.power_w, first.power_limit_w) == (99.5, 700)
    assert (first.temperature_c, second.temperature_c) == (41, 42)
    assert first.throttled_by == ("power cap", "hardware thermal"), "idle is no reason to worry"
    assert (first.num_processes, second.num_processes) == (0, 1)


def test_an_old_library_leaves_gaps(driver) -> None:
    driver("nvmlDeviceGetCurrentClocksThrottleReasons")
    assert report_gpus().gpus[0].throttled_by is None


def test_without_a_driver_it_says_so(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert report_gpus().absent == "nvidia-ml-py is not installed"
