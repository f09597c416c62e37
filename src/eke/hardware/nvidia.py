"""NVML queries: visible GPUs and their state.

Unlike torch, NVML takes milliseconds, creates no CUDA context (hundreds of MiB on the GPU) and does
not fix the visible devices before the worker starts.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

_T = TypeVar("_T")

NO_GPU = "the NVIDIA driver lists no GPU"


@dataclass(frozen=True)
class Gpu:
    """Driver information about one GPU."""

    name: str
    memory_bytes: int | None
    capability: tuple[int, int] | None


def ask_driver(question: Callable[[Any], _T]) -> tuple[_T | None, str]:
    """Return the result of a function of the `pynvml` module, or None and the reason."""
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"no usable NVIDIA driver: {error}"
    try:
        return question(pynvml), ""
    except (pynvml.NVMLError, AttributeError) as error:
        return None, f"the NVIDIA driver returned an error: {error}"
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def visible_handles(nvml: Any) -> list[Any]:
    """Return handles of GPUs and MIG slices visible to CUDA, in order of CUDA_VISIBLE_DEVICES."""
    handles = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):  # a GPU may be off the bus
            handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = list(handles.values()) if visible is None else _listed(nvml, visible, handles)
    return [each for handle in chosen for each in _slices(nvml, handle)]


def _listed(nvml: Any, visible: str, handles: dict[int, Any]) -> list[Any]:
    """Return the handles of CUDA_VISIBLE_DEVICES up to the first unknown entry."""
    uuids = {index: nvml.nvmlDeviceGetUUID(handle) for index, handle in handles.items()}
    chosen: list[Any] = []
    seen = set()
    for entry in (part.strip() for part in visible.split(",")):
        key: Any = entry
        if entry.startswith("MIG-"):
            handle = _ask(nvml, partial(nvml.nvmlDeviceGetHandleByUUID, entry))
        else:
            key = _index_of(entry, uuids)
            handle = handles.get(key)
        if handle is None:  # CUDA stops at an unknown entry, for example -1
            break
        if key in seen:  # as in torch.cuda._parse_visible_devices
            return []
        seen.add(key)
        chosen.append(handle)
    return chosen


def visible_gpus(nvml: Any) -> list[Gpu]:
    """Return the GPUs of a CUDA process: one MIG slice or all GPUs (NVIDIA MIG User Guide)."""
    handles = visible_handles(nvml)
    slices = [handle for handle in handles if _is_slice(nvml, handle)]
    return [_query_gpu(nvml, handle) for handle in slices[:1] or handles]


def _slices(nvml: Any, handle: Any) -> list[Any]:
    """Return the slices of a GPU in MIG mode, otherwise the GPU or slice itself."""
    try:
        if _is_slice(nvml, handle) or not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return [handle]
    except (nvml.NVMLError, AttributeError):  # most GPUs and old drivers do not support MIG
        return [handle]
    found = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError):  # some slots have no slice
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
    return found


def _is_slice(nvml: Any, handle: Any) -> bool:
    with suppress(nvml.NVMLError):
        return bool(nvml.nvmlDeviceIsMigDeviceHandle(handle))
    return False


def _index_of(entry: str, uuids: dict[int, str]) -> Any:
    """Return the GPU index of an entry: a number or an unambiguous UUID prefix."""
    if entry.isdecimal():
        return int(entry)
    matches = [index for index, uuid in uuids.items() if uuid.startswith(entry)]
    return matches[0] if entry.startswith("GPU-") and len(matches) == 1 else None


def _query_gpu(nvml: Any, handle: Any) -> Gpu:
    """Return name, memory and capability, None for values that the driver does not report."""
    info = nvml.nvmlDeviceGetMemoryInfo
    # CUDA cannot allocate the memory reserved by the driver.
    found = _ask(nvml, lambda: info(handle, version=nvml.nvmlMemory_v2))
    memory = int(found.total - found.reserved) if found else None
    memory = memory or _ask(nvml, lambda: int(info(handle).total))
    pair = _ask(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    capability = (int(pair[0]), int(pair[1])) if pair else None
    name = str(nvml.nvmlDeviceGetName(handle))
    # A slice must not match the GPU's datasheet, and not all drivers add MIG to the name.
    if _is_slice(nvml, handle) and "MIG" not in name:
        name += " MIG"
    return Gpu(name, memory, capability)


_THROTTLES = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
"""Bit -> name, without low clocks of an idle GPU (0x1).
Source: https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"""


@dataclass(frozen=True)
class GpuState(Gpu):
    """Current state of a GPU; None for values that the driver does not report."""

    index: int
    used_bytes: int | None
    temperature_c: int | None
    power_w: float | None
    power_limit_w: float | None
    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    throttled_by: tuple[str, ...] | None
    utilisation_percent: int | None
    num_processes: int | None


@dataclass(frozen=True)
class GpuReport:
    """All GPUs of this machine, including those hidden by CUDA_VISIBLE_DEVICES."""

    absent: str
    """Reason for the absence of GPUs, empty if there are GPUs."""
    driver: str | None = None
    cuda_driver: str | None = None
    """Newest CUDA version supported by the driver: `13.0`."""
    gpus: tuple[GpuState, ...] = ()


def report_gpus() -> GpuReport:
    """Query the driver without raising errors."""

    def report(nvml: Any) -> GpuReport:
        states = tuple(_state(nvml, number) for number in range(nvml.nvmlDeviceGetCount()))
        return GpuReport("" if states else NO_GPU, *driver_versions(nvml), states)

    found, reason = ask_driver(report)
    return found or GpuReport(reason)


def driver_versions(library: Any) -> tuple[str | None, str | None]:
    """Return the versions of the driver and of the newest supported CUDA, None if unknown."""
    number = _ask(library, lambda: int(library.nvmlSystemGetCudaDriverVersion_v2()))
    cuda = f"{number // 1000}.{number % 1000 // 10}" if number else None  # 13010 is CUDA 13.1
    return _ask(library, lambda: str(library.nvmlSystemGetDriverVersion())), cuda


def _ask(library: Any, question: Callable[[], _T]) -> _T | None:
    """Return the result of a query, None if driver, GPU or nvidia-ml-py does not support it."""
    try:
        return question()
    except (library.NVMLError, AttributeError):
        return None


def _state(library: Any, index: int) -> GpuState:
    handle = library.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *arguments: Any, part: Callable[[Any], Any] = int) -> Any:
        return _ask(library, lambda: part(getattr(library, name)(handle, *arguments)))

    return GpuState(
        **vars(_query_gpu(library, handle)),
        index=index,
        used_bytes=ask("nvmlDeviceGetMemoryInfo", part=lambda memory: int(memory.used)),
        temperature_c=ask("nvmlDeviceGetTemperature", 0),
        power_w=ask("nvmlDeviceGetPowerUsage", part=lambda milliwatts: milliwatts / 1000),
        power_limit_w=ask("nvmlDeviceGetPowerManagementLimit", part=lambda limit: limit / 1000),
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", 1),
        max_sm_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", 1),
        throttled_by=ask(
            "nvmlDeviceGetCurrentClocksThrottleReasons",
            part=lambda bits: tuple(word for bit, word in _THROTTLES.items() if bits & bit),
        ),
        utilisation_percent=ask("nvmlDeviceGetUtilizationRates", part=lambda rates: int(rates.gpu)),
        num_processes=ask("nvmlDeviceGetComputeRunningProcesses", part=len),
    )
