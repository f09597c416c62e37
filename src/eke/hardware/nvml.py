"""NVIDIA's management library: which GPUs a CUDA program started here would see.

NVML is asked, not torch: it answers in milliseconds, makes no CUDA context (hundreds of MiB on the
GPU) and leaves the choice of devices open for the worker.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """What the driver says about one GPU."""

    name: str
    memory_bytes: int | None
    capability: tuple[int, int] | None


@contextmanager
def session() -> Iterator[tuple[Any | None, str]]:
    """The initialised `pynvml` module and an empty string, or None and the reason there is none."""
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
    """Handles of the GPUs that CUDA can be shown, in the order of `visible`.

    A GPU in MIG mode computes nothing itself: its slices stand in its place, and nothing where it
    has none. One process sees one slice of them (`seen_by_one_process`).

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
    """What one CUDA process enumerates of them: a single slice, and then no whole GPU.

    Source: NVIDIA's MIG User Guide, "CUDA Device Enumeration".
    """
    slices = [handle for handle in handles if _is_slice(nvml, handle)]
    return slices[:1] or list(handles)


def _with_slices(nvml: Any, handles: Iterable[Any]) -> list[Any]:
    return [piece for handle in handles for piece in _pieces(nvml, handle)]


def _pieces(nvml: Any, handle: Any) -> list[Any]:
    """The slices of a GPU in MIG mode, which there may be none of; else the GPU or slice itself."""
    try:
        if _is_slice(nvml, handle) or not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return [handle]
    except (nvml.NVMLError, AttributeError):  # most GPUs cannot be sliced, old drivers slice none
        return [handle]
    found = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError):  # places for slices may be empty
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
    return found


def _is_slice(nvml: Any, handle: Any) -> bool:
    with suppress(nvml.NVMLError):
        return bool(nvml.nvmlDeviceIsMigDeviceHandle(handle))
    return False


def _index_of(entry: str, uuids: dict[int, str]) -> Any:
    """Index of the GPU that one entry names, by number or unambiguous start of its UUID."""
    if entry.isdecimal():
        return int(entry)
    matches = [index for index, uuid in uuids.items() if uuid.startswith(entry)]
    return matches[0] if entry.startswith("GPU-") and len(matches) == 1 else None


def _mig_handle(nvml: Any, uuid: str) -> Any | None:
    """Handle of a slice of a GPU; None when the driver does not know it."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None


def describe(nvml: Any, handle: Any) -> Gpu:
    """Name, memory and capability; what the driver does not answer (unified memory) is None."""
    memory = capability = None
    with suppress(nvml.NVMLError):
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    with suppress(nvml.NVMLError):
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability = (int(major), int(minor))
    name = str(nvml.nvmlDeviceGetName(handle))
    # A slice must not be taken for the whole GPU and its peaks; not all drivers name it so.
    if _is_slice(nvml, handle) and "MIG" not in name:
        name += " MIG"
    return Gpu(name, memory, capability)
