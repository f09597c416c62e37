"""Number formats: autocast, loss scaling and TF32. The only file that sets torch's global flags."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from eke.plan import Plan
from eke.schema import Compute


@dataclass(frozen=True)
class Formats:
    """How a forward pass computes, and how its loss is scaled."""

    autocast: Callable[[], AbstractContextManager[object]]
    """A fresh context for each forward pass."""
    scaler: torch.amp.GradScaler | None
    """Loss scaling for float16, on CPUs too; None for the other formats."""


def build_formats(plan: Plan, device: torch.device) -> Formats:
    """Torch's own autocast and loss scaler: Accelerate's fp16 is a silent no-op on a CPU."""
    return BUILDERS[plan.config.precision.compute](plan, device)


def _build(plan: Plan, device: torch.device) -> Formats:
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = plan.compute.tf32
        torch.backends.cudnn.allow_tf32 = plan.compute.tf32
    name = plan.compute.autocast
    if name is None:
        return Formats(nullcontext, None)
    dtype: torch.dtype = getattr(torch, name)
    scaler = torch.amp.GradScaler(device.type) if plan.compute.loss_scaling else None
    return Formats(lambda: torch.autocast(device.type, dtype=dtype), scaler)


BUILDERS: dict[Compute, Callable[[Plan, torch.device], Formats]] = {
    Compute.float32: _build,
    Compute.bfloat16: _build,
    Compute.float16: _build,
}
"""`precision.compute` -> builder; the options of the group are presets of it and of `tf32`."""
