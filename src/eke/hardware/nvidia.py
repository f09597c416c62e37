"""NVML queries: visible GPUs, their state, and the links between them.

NVML instead of torch: it answers in milliseconds, creates no CUDA context (hundreds of MiB on the
GPU) and does not fix the choice of devices before the worker starts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import permutations
from typing import Any, TypeVar


@dataclass(frozen=True)
class Gpu:
    """Driver information about one GPU."""

    name: str
    memory_bytes: int | None
    capability: tuple[int, int] | None


@contextmanager
def session() -> Iterator[tuple[Any | None, str]]:
    """Yield the initialised `pynvml` module and an empty string, or None and the reason."""
    try:
        import pynvml
    except ImportError:
        yield None, "nvidia-ml-py is not installed"
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield None, f"no usable NVIDIA driver: {error}"
        return
    try:
        yield pynvml, ""
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def visible_handles(nvml: Any, visible: str | None) -> list[Any]:
    """Handles of the GPUs visible to CUDA, in the order of `visible`.

    A GPU in MIG mode is replaced by its slices, if any. One process sees only one of them
    (`seen_by_one_process`).

    Args:
        nvml: the initialised module.
        visible: CUDA_VISIBLE_DEVICES; None when it is not set, which shows all.

    CUDA stops at the first entry it does not know (-1 is the usual way to hide all), and torch
    takes a repeated one for an empty list (`torch.cuda._parse_visible_devices`).
    """
    handles = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):  # a GPU that has fallen off the bus
            handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
    if visible is None:
        return _with_slices(nvml, handles.values())
    uuids = {index: nvml.nvmlDeviceGetUUID(handle) for index, handle in handles.items()}
    chosen: list[Any] = []
    seen = set()
    for entry in (part.strip() for part in visible.split(",")):
        if entry.startswith("MIG-"):
            key, handle = entry, _mig_handle(nvml, entry)
        else:
            index = _index_of(entry, uuids)
            key, handle = index, handles.get(index)
        if handle is None:
            break
        if key in seen:
            return []
        seen.add(key)
        chosen.append(handle)
    return _with_slices(nvml, chosen)


def seen_by_one_process(nvml: Any, handles: Sequence[Any]) -> list[Any]:
    """The devices that one CUDA process enumerates: a single slice, or all whole GPUs.

    Source: NVIDIA's MIG User Guide, "CUDA Device Enumeration".
    """
    slices = [handle for handle in handles if _is_slice(nvml, handle)]
    return slices[:1] or list(handles)


def _with_slices(nvml: Any, handles: Iterable[Any]) -> list[Any]:
    return [each for handle in handles for each in _slices(nvml, handle)]


def _slices(nvml: Any, handle: Any) -> list[Any]:
    """The slices of a GPU in MIG mode (maybe none); otherwise the GPU or slice itself."""
    try:
        if _is_slice(nvml, handle) or not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return [handle]
    except (nvml.NVMLError, AttributeError):  # most GPUs and old drivers do not support MIG
        return [handle]
    found = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError):  # not every slot has a slice
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
    return found


def _is_slice(nvml: Any, handle: Any) -> bool:
    with suppress(nvml.NVMLError):
        return bool(nvml.nvmlDeviceIsMigDeviceHandle(handle))
    return False


def _index_of(entry: str, uuids: dict[int, str]) -> Any:
    """Index of the GPU of one entry: a number or an unambiguous UUID prefix."""
    if entry.isdecimal():
        return int(entry)
    matches = [index for index, uuid in uuids.items() if uuid.startswith(entry)]
    return matches[0] if entry.startswith("GPU-") and len(matches) == 1 else None


def _mig_handle(nvml: Any, uuid: str) -> Any | None:
    """Handle of a MIG slice; None if the driver does not know it."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None


def query_gpu(nvml: Any, handle: Any) -> Gpu:
    """Name, memory and capability; None for values the driver does not report."""
    memory = capability = None
    with suppress(nvml.NVMLError):
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    with suppress(nvml.NVMLError):
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability = (int(major), int(minor))
    name = str(nvml.nvmlDeviceGetName(handle))
    # A slice must not match the whole GPU's datasheet; not all drivers add MIG to the name.
    if _is_slice(nvml, handle) and "MIG" not in name:
        name += " MIG"
    return Gpu(name, memory, capability)


T = TypeVar("T")

MAX_LINKS = 36
"""NVML_NVLINK_MAX_LINKS of nvidia-ml-py 13; a GPU has 18 at most today."""

SWITCH = 2
"""NVML_NVLINK_DEVICE_TYPE_SWITCH."""

P2P_READ = 0
"""NVML_P2P_CAPS_INDEX_READ; a tuple by mistake in nvidia-ml-py 13."""

PATHS = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t -> its name in `nvidia-smi topo -m`."""

THROTTLES = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
"""Bit of nvmlClocksEventReasons -> name; an idle GPU's low clocks (0x1) are normal.
Source: https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"""


@dataclass(frozen=True)
class GpuState:
    """Current state of one GPU; None for values the driver does not report."""

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
    """All GPUs of this machine, including those hidden by CUDA_VISIBLE_DEVICES."""

    absent: str
    """Reason if there is no GPU; else empty."""
    driver: str | None = None
    cuda_driver: str | None = None
    """Newest CUDA the driver supports: `13.0`."""
    gpus: tuple[GpuState, ...] = ()
    links: dict[str, str] | None = None
    """`0-1` -> `NV18`, or the kind of PCIe path as `nvidia-smi topo -m` names it; `?` unknown."""
    p2p: dict[str, bool] | None = None
    """`0-1` -> whether GPU 0 can read the memory of GPU 1 directly."""


def report_gpus() -> GpuReport:
    """Query the driver; never raises."""
    with session() as (library, reason):
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
    """Result of a query; None if driver, GPU or nvidia-ml-py does not support it."""
    try:
        return question()
    except (library.NVMLError, AttributeError):
        return None


def _state(library: Any, index: int, handle: Any) -> GpuState:
    described = query_gpu(library, handle)

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
    """Link between two GPUs: number of NVLinks (direct or switched), or the PCIe path."""
    if count := _num_nvlinks(library, one, other):
        return f"NV{count}"
    level = _ask(library, lambda: int(library.nvmlDeviceGetTopologyCommonAncestor(one, other)))
    return "?" if level is None else PATHS.get(level, "?")


def _num_nvlinks(library: Any, one: Any, other: Any) -> int:
    """Active NVLinks of `one` to `other`, or to a switch that both use."""
    bus = _ask(library, lambda: _bus(library.nvmlDeviceGetPciInfo(other)))
    ends = _ends(library, one)
    straight = sum(end == bus for end in ends)
    switched = ends.count("switch")
    return straight or (min(switched, _ends(library, other).count("switch")))


def _ends(library: Any, handle: Any) -> list[str]:
    """Remote end of each active link: a bus address, or `switch`."""
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
