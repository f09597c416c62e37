"""The experts of a layer under autocast.

transformers multiplies all experts of a layer at once by `grouped_mm`, an operation that PyTorch's
autocast does not know: its operands would stay float32, and most of such a model would be computed
without tensor cores, whatever `precision` says.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def has_experts(model: nn.Module) -> bool:
    """Whether a feed-forward layer of the model is a choice of several."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())


def cast_experts(model: nn.Module) -> None:
    """Let autocast cast the operands of the experts' product, in this process and once for all.

    Without autocast nothing is cast. Seen with transformers 5.23, which looks the function up at
    each call; in a version without it nothing is replaced, and tests/unit/build/test_experts.py
    tells.

    Args:
        model: without experts nothing is imported for it.
    """
    if not has_experts(model):
        return
    from transformers.integrations import moe

    found: Any = getattr(moe, "_grouped_mm", None)
    if found is not None and not hasattr(found, "__wrapped__"):
        vars(moe)["_grouped_mm"] = _under_autocast(found)


def _under_autocast(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(multiply)
    def product(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        kind = weight.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            input, weight = input.to(dtype), weight.to(dtype)
        return multiply(input, weight, offs)

    return product
