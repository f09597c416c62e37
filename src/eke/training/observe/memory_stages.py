"""Memory measurement: device counters on a GPU, a profiled step on a CPU."""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from eke.training.distributed.fsdp import local_tensor
from eke.training.loop.environment import own_resident_bytes
from eke.training.model.adapters import quant_tensors
from eke.training.optimizer.build_optimizer import state_tensors


def memory_in_use(device: torch.device) -> int | None:
    """Return the bytes in use on the GPU, or by this process on a CPU. None if unknown."""
    if device.type == "cpu":
        return own_resident_bytes()
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except Exception:  # a driver error: the value is absent and the run continues
        return None


def device_peak(device: torch.device) -> int | None:
    """Return the highest sum of tensors so far on a GPU, None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def live_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, others: Sequence[Tensor] = ()
) -> int:
    """Return the bytes of weights, buffers, gradients, non-scalar optimizer state and others."""
    weights: list[Tensor] = [*model.parameters()]
    weights += [p for group in optimizer.param_groups for p in group["params"]]  # or their copies
    tensors = [*weights, *model.buffers(), *quant_tensors(model), *others]
    tensors += [p.grad for p in weights if p.grad is not None]
    tensors += state_tensors(optimizer)
    return storage_bytes(tensors)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors in this process, with shared storages counted once."""
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


class AllocationProfile:
    """Profile of one CPU step for the peak of tensor memory, which PyTorch does not count.

    The profiler reports each allocation and release of this thread with the bytes then allocated.
    Peak = bytes alive before + highest increase since the first report. A long step is profiled in
    parts: the profiler keeps 75 MB per micro-batch of four layers (notes/lab/memory.md).
    """

    def __init__(self, alive_before: int) -> None:
        self.alive_before = alive_before
        self.peak: int | None = None
        self.problem = ""
        """Reason why a successful step has no peak."""
        self._first: int | None = None
        self._highest = 0
        self._profile: Any = None
        self._counting = _counted_in_every_thread()
        self.is_complete = False
        """True if blocks of other threads are counted, also between parts."""

    def __enter__(self) -> "AllocationProfile":
        self.is_complete = self._counting.__enter__()
        self._start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop(counts=error[0] is None)
        self._counting.__exit__(None, None, None)
        with suppress(OSError, AttributeError):  # glibc would keep memory of the profiler
            ctypes.CDLL(None).malloc_trim(0)
        if error[0] is None and self._first is None and not self.problem:
            self.problem = "the profiler reported no allocations"
        if error[0] is None and not self.problem:
            self.peak = self.alive_before + self._highest

    def cut(self) -> None:
        """End a part of the step and release the profiler's data."""
        self._stop(counts=True)
        self._start()

    def _start(self) -> None:
        # torch.profiler's own class has a reference cycle: its data would wait for the garbage
        # collector.
        self._profile = profile(use_cpu=True, use_kineto=True, profile_memory=True)
        self._profile.__enter__()

    def _stop(self, counts: bool) -> None:
        ended, self._profile = self._profile, None
        ended.__exit__(None, None, None)
        if not counts or self.problem:
            return
        try:
            found = allocations(ended.kineto_results.experimental_event_tree())
        except AttributeError as error:
            self.problem = f"unknown profiler format of torch {torch.__version__} ({error})"
            return
        for change, total in found:
            if self._first is None:
                self._first = total - change
            self._highest = max(self._highest, total - self._first)


@contextmanager
def _counted_in_every_thread() -> Iterator[bool]:
    """Make the CPU allocator count all threads' blocks (notes/lab/memory.md). Yields success."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        flag = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    except (OSError, ValueError):  # another library name, or no flag: only this thread counts
        yield False
        return
    flag.value = True
    try:
        yield True
    finally:
        flag.value = False


def allocations(tree: Sequence[Any]) -> list[tuple[int, int]]:
    """Return each event's change of the allocated bytes, and the bytes allocated after it."""
    found, left = [], list(tree)
    allocation = type(left[0].tag).Allocation if left else None
    while left:
        event = left.pop()
        left += event.children
        if event.tag == allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.alloc_size, fields.total_allocated))
    return [(change, total) for _, change, total in sorted(found, key=lambda each: each[0])]
