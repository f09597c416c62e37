"""How much memory a run takes: the device's own counters on a GPU, a profiled step on a CPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from eke.build.four_bits import quant_tensors
from eke.build.optimizer import state_tensors
from eke.build.sharding import part
from eke.run.process import resident_bytes


def memory_in_use(device: torch.device) -> int | None:
    """Bytes in use now: of the GPU, by everybody, as the guides print it; of this process on a CPU.

    None when the driver does not tell.
    """
    if device.type == "cpu":
        return resident_bytes()
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
    """Bytes of weights, buffers, gradients and optimizer state, shared storages counted once.

    As in `eke.sizes.StateBytes`, the optimizer's scalar step counters are left out.

    Args:
        model: without wrappers.
        optimizer: of that model.
        others: tensors that neither of them knows of.
    """
    weights: list[Tensor] = [*model.parameters()]
    weights += [p for group in optimizer.param_groups for p in group["params"]]  # or their copies
    tensors = [*weights, *model.buffers(), *quant_tensors(model), *others]
    tensors += [p.grad for p in weights if p.grad is not None]
    tensors += state_tensors(optimizer)
    tensors = [part(tensor) for tensor in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class AllocationProfile:
    """Context around one CPU step: the highest sum of tensor memory while it ran.

    PyTorch counts no peak on a CPU; the profiler reports each allocation and release. Peak = what
    was alive before + the highest running sum. Releases of blocks from before are not reported; a
    training step has none. What that costs the one step: docs/lab.md.
    """

    def __init__(self, alive_before: int) -> None:
        self.alive_before = alive_before
        self.peak: int | None = None
        # There is one cycle of it; torch 2.11 and 2.12 warn of all others without `acc_events`.
        self._profile: Any = profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )

    def __enter__(self) -> "AllocationProfile":
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        if error[0] is None:
            self.peak = self.alive_before + self._highest_sum()

    def _highest_sum(self) -> int:
        events = self._profile.profiler.kineto_results.events()
        changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        running = highest = 0
        for _, num_bytes in sorted(changes, key=lambda change: change[0]):
            running += num_bytes
            highest = max(highest, running)
        return highest
