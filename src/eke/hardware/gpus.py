"""Everything the NVIDIA driver tells about the GPUs of a machine, and what connects them."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from typing import Any, TypeVar

from eke.hardware import nvml

T = TypeVar("T")

MAX_LINKS = 36
"""NVML_NVLINK_MAX_LINKS of nvidia-ml-py 13; a GPU has 18 at most today."""

SWITCH = 2
"""NVML_NVLINK_DEVICE_TYPE_SWITCH."""

P2P_READ = 0
"""NVML_P2P_CAPS_INDEX_READ; a tuple by mistake in nvidia-ml-py 13."""

PATHS = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t -> the word `nvidia-smi topo -m` has for it."""

THROTTLES = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
"""Bit of nvmlClocksEventReasons -> in words; an idle GPU's low clocks (0x1) are no reason to
worry. Source: https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"""


@dataclass(frozen=True)
class GpuState:
    """One GPU as it is now; None for what the driver does not answer."""

    index: int
    name: str
    bus: str
    memory_bytes: int | None
    used_bytes: int | None
    capability: tuple[int, int] | None
    temperature_c: int | None
    power_w: float | None
    power_limit_w: float | None
    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    throttled_by: tuple[str, ...] | None
    utilisation_percent: int | None
    persistence: bool | None
    ecc: bool | None
    num_processes: int | None


@dataclass(frozen=True)
class GpuReport:
    """The GPUs of this machine, whatever CUDA_VISIBLE_DEVICES hides."""

    absent: str
    """Why there is none; empty when there is one."""
    driver: str | None = None
    cuda_driver: str | None = None
    """Newest CUDA the driver supports: `13.0`."""
    gpus: tuple[GpuState, ...] = ()
    links: dict[str, str] | None = None
    """`0-1` -> `NV18`, or the kind of PCIe path as `nvidia-smi topo -m` names it; `?` unknown."""
    p2p: dict[str, bool] | None = None
    """`0-1` -> whether GPU 0 can read the memory of GPU 1 directly."""


def report_gpus() -> GpuReport:
    """Ask the driver; never raises."""
    with nvml.session() as (library, reason):
        if library is None:
            return GpuReport(reason)
        try:
            count = int(library.nvmlDeviceGetCount())
            handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            states = tuple(_state(library, n, handle) for n, handle in enumerate(handles))
        except library.NVMLError as error:
            return GpuReport(f"the NVIDIA driver does not answer: {error}")
        number = _ask(library, lambda: int(library.nvmlSystemGetCudaDriverVersion_v2()))
        return GpuReport(
            absent="" if states else "the NVIDIA driver lists no GPU",
            driver=_ask(library, lambda: str(library.nvmlSystemGetDriverVersion())),
            cuda_driver=f"{number // 1000}.{number % 1000 // 10}" if number else None,
            gpus=states,
            links=_pairs(handles, lambda one, other: _link(library, one, other)),
            p2p=_pairs(handles, lambda one, other: _reads(library, one, other)),
        )


def _ask(library: Any, question: Callable[[], T]) -> T | None:
    """The answer, or None where this driver, GPU or nvidia-ml-py has none."""
    try:
        return question()
    except (library.NVMLError, AttributeError):
        return None


def _state(library: Any, index: int, handle: Any) -> GpuState:
    described = nvml.describe(library, handle)

    def ask(name: str, *arguments: Any, part: Callable[[Any], Any] = int) -> Any:
        return _ask(library, lambda: part(getattr(library, name)(handle, *arguments)))

    milliwatts = 1000
    return GpuState(
        index=index,
        name=described.name,
        bus=ask("nvmlDeviceGetPciInfo", part=_bus) or "",
        memory_bytes=described.memory_bytes,
        used_bytes=ask("nvmlDeviceGetMemoryInfo", part=lambda memory: int(memory.used)),
        capability=described.capability,
        temperature_c=ask("nvmlDeviceGetTemperature", 0),
        power_w=ask("nvmlDeviceGetPowerUsage", part=lambda value: value / milliwatts),
        power_limit_w=ask(
            "nvmlDeviceGetPowerManagementLimit", part=lambda value: value / milliwatts
        ),
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", 1),
        max_sm_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", 1),
        throttled_by=ask("nvmlDeviceGetCurrentClocksThrottleReasons", part=_throttles),
        utilisation_percent=ask("nvmlDeviceGetUtilizationRates", part=lambda rates: int(rates.gpu)),
        persistence=ask("nvmlDeviceGetPersistenceMode", part=bool),
        ecc=ask("nvmlDeviceGetEccMode", part=lambda modes: bool(modes[0])),
        num_processes=ask("nvmlDeviceGetComputeRunningProcesses", part=len),
    )


def _bus(info: Any) -> str:
    bus = info.busId
    return (bus.decode() if isinstance(bus, bytes) else str(bus)).lower()


def _throttles(bits: int) -> tuple[str, ...]:
    return tuple(word for bit, word in THROTTLES.items() if bits & bit)


def _pairs(handles: list[Any], ask: Callable[[Any, Any], T]) -> dict[str, T]:
    numbers = permutations(range(len(handles)), 2)
    return {f"{one}-{other}": ask(handles[one], handles[other]) for one, other in numbers}


def _link(library: Any, one: Any, other: Any) -> str:
    """What connects two GPUs: as many NVLinks, straight or through a switch, or a PCIe path."""
    if count := _num_nvlinks(library, one, other):
        return f"NV{count}"
    level = _ask(library, lambda: int(library.nvmlDeviceGetTopologyCommonAncestor(one, other)))
    return "?" if level is None else PATHS.get(level, "?")


def _num_nvlinks(library: Any, one: Any, other: Any) -> int:
    """Active links of `one` that end at `other`, or at a switch where `other` has links, too."""
    bus = _ask(library, lambda: _bus(library.nvmlDeviceGetPciInfo(other)))
    ends = _ends(library, one)
    straight = sum(end == bus for end in ends)
    switched = ends.count("switch")
    return straight or (min(switched, _ends(library, other).count("switch")))


def _ends(library: Any, handle: Any) -> list[str]:
    """Where each active link of a GPU goes: a bus address, or `switch`."""
    ends = []
    for link in range(MAX_LINKS):
        with suppress(library.NVMLError, AttributeError):  # no such link
            if not library.nvmlDeviceGetNvLinkState(handle, link):
                continue
            kind = _remote_kind(library, handle, link)
            info = library.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)
            ends.append("switch" if kind == SWITCH else _bus(info))
    return ends


def _remote_kind(library: Any, handle: Any, link: int) -> int | None:
    return _ask(library, lambda: int(library.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)))


def _reads(library: Any, one: Any, other: Any) -> bool:
    status = _ask(library, lambda: int(library.nvmlDeviceGetP2PStatus(one, other, P2P_READ)))
    return status == 0  # NVML_P2P_STATUS_OK
