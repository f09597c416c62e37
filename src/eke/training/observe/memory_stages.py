"""Memory measurement: device counters on a GPU, a profiled step on a CPU."""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from eke.training.distributed.fsdp import part
from eke.training.loop.environment import own_resident_bytes
from eke.training.model.adapters import quant_tensors
from eke.training.optimizer.build_optimizer import state_tensors


def memory_in_use(device: torch.device) -> int | None:
    """Bytes in use: of the whole GPU, as in the guides; of this process on a CPU.

    None when the driver does not tell.
    """
    if device.type == "cpu":
        return own_resident_bytes()
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except Exception:  # any trouble with the driver: the number is absent, the run goes on
        return None


def device_peak(device: torch.device) -> int | None:
    """Highest sum of tensors so far on a GPU; PyTorch does not count it on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def live_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, others: Sequence[Tensor] = ()
) -> int:
    """Bytes of weights, buffers, gradients and optimizer state, and of others.

    As in `eke.models.sizes.StateBytes`, the optimizer's scalar step counters are excluded.
    """
    weights: list[Tensor] = [*model.parameters()]
    weights += [p for group in optimizer.param_groups for p in group["params"]]  # or their copies
    tensors = [*weights, *model.buffers(), *quant_tensors(model), *others]
    tensors += [p.grad for p in weights if p.grad is not None]
    tensors += state_tensors(optimizer)
    return storage_bytes(tensors)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that this process holds of tensors, shared storages counted once."""
    storages = [part(tensor).untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


class AllocationProfile:
    """Context around one CPU step: the highest sum of tensor memory while it ran.

    PyTorch counts no peak on a CPU; the profiler reports each allocation and release of this
    thread, and what is allocated in the process then. Peak = what was alive before + by how much
    that was higher than at the first report. Releases of blocks from before are not reported; a
    training step has none. The profiler keeps 75 MB for each micro-batch of four layers until it is
    read (docs/lab/memory.md), so a long step is profiled in parts, of which it holds one.
    """

    def __init__(self, alive_before: int) -> None:
        self.alive_before = alive_before
        self.peak: int | None = None
        self.problem = ""
        """Reason that a successful step has no peak."""
        self._first: int | None = None
        self._highest = 0
        self._profile: Any = None
        self._counting = counted_in_every_thread()
        self.is_complete = False
        """Whether other threads' blocks count, also between parts."""

    def __enter__(self) -> "AllocationProfile":
        self.is_complete = self._counting.__enter__()
        self._start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop(counts=error[0] is None)
        self._counting.__exit__(None, None, None)
        with suppress(OSError, AttributeError):  # glibc would keep what the profiler has freed
            ctypes.CDLL(None).malloc_trim(0)
        if error[0] is None and self._first is None and not self.problem:
            self.problem = "the profiler reported no allocations"
        if error[0] is None and not self.problem:
            self.peak = self.alive_before + self._highest

    def cut(self) -> None:
        """End a part of the step, and release the profiler's data."""
        self._stop(counts=True)
        self._start()

    def _start(self) -> None:
        # Not torch.profiler's: it refers to itself, and what it has kept would wait for the
        # garbage collector.
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
            self.problem = f"torch {torch.__version__}'s profiler is not read as before ({error})"
            return
        for change, total in found:
            if self._first is None:
                self._first = total - change
            self._highest = max(self._highest, total - self._first)


@contextmanager
def counted_in_every_thread() -> Iterator[bool]:
    """Have PyTorch's CPU allocator count the blocks of all threads; yields whether it does.

    It does so in threads that profile memory, and else only if this flag is set. A thread of gloo
    often is the last to hold what FSDP2 gathered: without it, the same run was measured at 24 and
    32 MB (docs/lab/memory.md).
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        flag = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    except (OSError, ValueError):  # another system's name, or a PyTorch without: this thread counts
        yield False
        return
    flag.value = True
    try:
        yield True
    finally:
        flag.value = False


def allocations(tree: Sequence[Any]) -> list[tuple[int, int]]:
    """Bytes by which each event of a profile changes what is allocated, and what that is then."""
    found, left = [], list(tree)
    allocation = type(left[0].tag).Allocation if left else None
    while left:
        event = left.pop()
        left += event.children
        if event.tag == allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.alloc_size, fields.total_allocated))
    return [(change, total) for _, change, total in sorted(found, key=lambda each: each[0])]
