"""Fused kernels in place of a model's own operations, and how to see that they are there."""

from collections.abc import Callable
from typing import Any

from torch import nn

from eke.common.errors import RunError
from eke.plan.planner import Plan
from eke.training.model.adapter_files import is_adapted
from eke.training.model.experts import has_experts


def apply_kernels(plan: Plan, model: nn.Module) -> None:
    """Replace what the plan's option of the group `kernels` replaces; before compilation.

    Raises:
        RunError: the option replaced nothing.
    """
    KERNELS[plan.config.kernels.option](model)


def replaced_modules(model: nn.Module, package: str = "liger_kernel") -> int:
    """Modules whose forward pass is the package's own."""
    return sum(_origin(module).startswith(package) for module in model.modules())


def _origin(module: nn.Module) -> str:
    """Python module that defines a forward pass; one bound to the instance comes first."""
    forward: Any = module.forward
    return str(getattr(forward, "__func__", forward).__module__)


def _none(model: nn.Module) -> None:
    """Every operation as transformers has it."""


def _liger(model: nn.Module) -> None:
    """Liger's normalisation, rotary positions and gated feed-forward; losses stay eke's.

    Of an adapted model Liger would look for the layers where the adapters' wrapper has none.
    Experts stay transformers': Liger's kernel for them knows neither autocast nor
    `precision.tf32=off` (liger-kernel 0.8.5: `tl.dot` of float32 operands takes TF32).
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    adapted: Any = model
    plain: nn.Module = adapted.get_base_model() if is_adapted(model) else model
    _apply_liger_kernel_to_instance(
        model=plain,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
        swiglu=not has_experts(model),
    )
    if not replaced_modules(model):
        raise RunError(
            f"kernels = liger: this version of liger-kernel replaces nothing in "
            f"{type(model).__name__}\n  -> kernels=none"
        )


KERNELS: dict[str, Callable[[nn.Module], None]] = {
    "none": _none,
    "liger": _liger,
    "fused_linear_cross_entropy": _none,
    "sparse_prediction": _none,
}
"""Option of `kernels` -> what it does to the model; the loss's fields: eke.training.model.loss."""
