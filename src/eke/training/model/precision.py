"""Number formats: autocast, loss scaling and TF32. The only file that sets torch's global flags."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from eke.config.schema import Compute
from eke.plan.planner import Plan

Context = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Formats:
    """How a forward pass computes, and how its loss is scaled."""

    autocast: Context
    """A fresh context for each forward pass of training."""
    eval_autocast: Context
    """The same for evaluation."""
    scaler: torch.amp.GradScaler | None
    """Loss scaling for float16, on CPUs too; None for the other formats."""


def build_formats(plan: Plan, device: torch.device) -> Formats:
    """Torch's own autocast and loss scaler: Accelerate's fp16 is a silent no-op on a CPU."""
    return BUILDERS[plan.config.precision.compute](plan, device)


def weights_dtype(plan: Plan) -> torch.dtype:
    """Format of weights and gradients."""
    dtype: torch.dtype = getattr(torch, plan.compute.weights)
    return dtype


def set_tf32(on: bool) -> None:
    """TF32 in the float32 products and convolutions of every GPU, or full float32.

    By the names that set both of torch's records of it. The newer `fp32_precision` (torch 2.9) sets
    one, and torch 2.13 then raises where the other is asked for, as inductor does for its cache.
    """
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def _build(plan: Plan, device: torch.device) -> Formats:
    if device.type == "cuda":
        set_tf32(plan.compute.tf32)
    return Formats(
        autocast=_context(plan.compute.autocast, device),
        eval_autocast=_context(plan.compute.eval_autocast, device),
        scaler=torch.amp.GradScaler(device.type) if plan.compute.loss_scaling else None,
    )


def _context(autocast: str | None, device: torch.device) -> Context:
    if autocast is None:
        return nullcontext
    dtype: torch.dtype = getattr(torch, autocast)
    return lambda: torch.autocast(device.type, dtype=dtype)


BUILDERS: dict[Compute, Callable[[Plan, torch.device], Formats]] = {
    Compute.float32: _build,
    Compute.bfloat16: _build,
    Compute.float16: _build,
}
"""`precision.compute` -> builder; the options of the group are presets of it and of `tf32`."""
