"""What is read of GPUs and their connections, from a driver that answers what it is told to."""

import sys
from types import SimpleNamespace

import pytest

from eke.hardware.nvidia import report_gpus

GIB = 2**30


class NVMLError(Exception):
    """What pynvml raises for every failure."""


class TwoGpus:
    """`pynvml` on a machine of two H100 with four NVLinks between them, straight or by a switch."""

    NVMLError = NVMLError

    def __init__(self, *, switch: bool = False, links: int = 4, silent: tuple[str, ...] = ()):
        self.switch, self.links, self.silent = switch, links, silent

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

    def nvmlDeviceGetPciInfo(self, gpu):
        return SimpleNamespace(busId=f"00000000:{gpu}A:00.0".encode())

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

    def nvmlDeviceGetPersistenceMode(self, gpu):
        return 1

    def nvmlDeviceGetEccMode(self, gpu):
        raise NVMLError("Not Supported")

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return [SimpleNamespace(pid=1, usedGpuMemory=None)] * gpu

    def nvmlDeviceGetNvLinkState(self, gpu, link):
        if link >= 18:
            raise NVMLError("Invalid Argument")
        return int(link < self.links)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu, link):
        return 2 if self.switch else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu, link):
        return SimpleNamespace(busId=f"00000000:{1 - gpu}a:00.0")  # of another spelling

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return 50

    def nvmlDeviceGetP2PStatus(self, one, other, index):
        return 0 if one < other else 5


@pytest.fixture
def driver(monkeypatch):
    """`driver(**facts)`: the machine has these GPUs."""

    def install(**facts):
        monkeypatch.setitem(sys.modules, "pynvml", TwoGpus(**facts))

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
    assert (first.persistence, first.ecc) == (True, None)
    assert (first.num_processes, second.num_processes) == (0, 1)


@pytest.mark.parametrize(
    ("facts", "link"),
    [({}, "NV4"), ({"switch": True}, "NV4"), ({"links": 0}, "SYS"), ({"links": 18}, "NV18")],
    ids=["straight", "through a switch", "none", "all"],
)
def test_what_connects_two_gpus(facts, link, driver) -> None:
    driver(**facts)
    report = report_gpus()
    assert report.links == {"0-1": link, "1-0": link}
    assert report.p2p == {"0-1": True, "1-0": False}


def test_an_old_library_leaves_gaps(driver) -> None:
    driver(
        links=0,
        silent=(
            "nvmlDeviceGetTopologyCommonAncestor",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
            "nvmlDeviceGetNvLinkState",
            "nvmlDeviceGetP2PStatus",
        ),
    )
    report = report_gpus()
    assert report.links == {"0-1": "?", "1-0": "?"}
    assert report.gpus[0].throttled_by is None
    assert report.p2p == {"0-1": False, "1-0": False}


def test_without_a_driver_it_says_so(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert report_gpus().absent == "nvidia-ml-py is not installed"
