"""Linear layers that multiply in float8, by torchao; and how to see that they do.

torchao is imported inside the functions: it is an extra.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from eke.plan.planner import Plan


@dataclass(frozen=True)
class Float8Layers:
    """What became of a model's linear layers."""

    converted: int
    """Those that multiply in float8."""
    total: int
    """All linear layers."""
    emulated: int
    """Converted ones that round to float8 and multiply in a wider format."""


def convert_linear_layers(plan: Plan, model: nn.Module, device: torch.device) -> None:
    """Let the model's linear layers multiply in float8, in place; their weights stay as they are.

    Accelerate's recipe for torchao: neither the first nor the last linear layer, nor one with a
    side that is no multiple of 16, which `torch._scaled_mm` demands; token counts are padded.
    A CPU has no float8 products: there the operands are rounded to float8 and multiplied wider.
    """
    if plan.compute.float8 == "off":
        return
    from accelerate.utils import ao
    from torchao.float8 import Float8LinearConfig

    recipe = Float8LinearConfig.from_recipe_name(plan.compute.float8)
    emulate = device.type != "cuda"
    ao.convert_model_to_fp8_ao(
        model, config=dataclasses.replace(recipe, pad_inner_dim=True, emulate=emulate)
    )


def count_float8(model: nn.Module) -> Float8Layers:
    """The linear layers of a model, read from their classes."""
    from torchao.float8.float8_linear import Float8Linear

    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    converted = [module for module in linear if isinstance(module, Float8Linear)]
    emulated = sum(bool(module.config.emulate) for module in converted)
    return Float8Layers(len(converted), len(linear), emulated)
