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

from eke.training.model.checkpointing import find_layers


def has_experts(model: nn.Module) -> bool:
    """Whether a feed-forward layer of the model is a choice of several."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())


def routed_parents(model: nn.Module) -> list[nn.Module]:
    """Modules that send each token to some of several equal modules.

    By structure: within a Transformer layer, a container of two or more modules of one class with
    parameters of the same names and shapes. The containers' parents are returned.
    """
    layers = find_layers(model)
    inner = {id(m): m for layer in layers for m in layer.modules() if m is not layer}
    return [m for m in inner.values() if any(map(_is_routed, m.children()))]


def routed_siblings(model: nn.Module) -> list[list[nn.Module]]:
    """The equal modules of each place in `routed_parents`."""
    containers = (c for parent in routed_parents(model) for c in parent.children())
    return [_with_parameters(container) for container in containers if _is_routed(container)]


def _is_routed(module: nn.Module) -> bool:
    experts = _with_parameters(module)
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(experts) < 2:
        return False
    kinds = {(type(m), *((n, tuple(p.shape)) for n, p in m.named_parameters())) for m in experts}
    return len(kinds) == 1


def _with_parameters(module: nn.Module) -> list[nn.Module]:
    """Children that learn: NLLB-MoE keeps a dropout among its experts."""
    return [m for m in module.children() if any(True for _ in m.parameters())]


def depend_on_all(module: nn.Module, late: bool) -> None:
    """Give each parameter of the module a gradient in every backward pass, of zero if need be.

    ZeRO-2 exchanges gradients in the order in which they are complete, which has to be that of the
    other ranks: with the zeros added to the input, all are complete after the module's own backward
    pass, one after the other. ZeRO-3 has weights only within the module: there to the output.

    Args:
        module: called with its hidden states, first or alone; before anything wraps it.
        late: add to the output.
    """

    def nothing() -> Any:
        return sum(p.reshape(-1)[:1].sum() * 0.0 for p in module.parameters() if p.requires_grad)

    def before(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (args[0] + nothing(), *args[1:]), kwargs
        name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        return args, {**kwargs, name: kwargs[name] + nothing()}

    def after(_: Any, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + nothing(), *output[1:])
        return output + nothing()

    if late:
        module.register_forward_hook(after)
    else:
        module.register_forward_pre_hook(before, with_kwargs=True)


def cast_experts(model: nn.Module) -> None:
    """Let autocast cast the operands of the experts' product, in this process and once for all.

    Without autocast nothing is cast. Seen with transformers 5.23, which looks the function up at
    each call; in a version without it nothing is replaced, and
    tests/unit/training/model/test_experts.py tells.

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
