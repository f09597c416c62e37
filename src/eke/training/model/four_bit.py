"""Weights in 4 bits, by bitsandbytes: what QLoRA trains adapters over.

Dettmers et al. 2023, arXiv:2305.14314. bitsandbytes is imported inside the functions.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from eke.config.schema import QLora
from eke.plan.planner import Plan
from eke.training.model.checkpointing import find_layers


def is_four_bit(plan: Plan) -> bool:
    """Whether the plan keeps weights in 4 bits."""
    return isinstance(plan.config.peft, QLora)


def quantise(plan: Plan, model: nn.Module, device: torch.device) -> nn.Module:
    """Replace the linear layers inside the Transformer layers by 4-bit ones, and move to `device`.

    One layer at a time: on a GPU there is never more than its own float32 weight beside the 4-bit
    ones. Embeddings, norms, heads, and what transformers itself keeps in float32
    (`_keep_in_fp32_modules`) stay as they are. The experts of a layer, which transformers holds as
    one parameter, are dequantised whenever the layer runs.

    Args:
        plan: its number format is what the 4-bit layers multiply in.
        model: with float32 weights on the host; changed in place.
        device: where the model is to be.
    """
    config = cast(QLora, plan.config.peft)
    compute = getattr(torch, plan.compute.autocast or "float32")
    kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for layer in find_layers(model):
        for name, module in list(layer.named_modules()):
            parent, leaf = layer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            if is_linear(module) and leaf not in kept:
                setattr(parent, leaf, _linear(module, config, compute, device))
            elif leaf == "experts":
                _quantise_parameters(module, config, device)
    return model.to(device)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix product that adapters are made for: GPT-2's class, too."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _linear(
    linear: nn.Module, config: QLora, compute: torch.dtype, device: torch.device
) -> nn.Module:
    """The 4-bit layer of the same product; GPT-2's Conv1D stores its weight the other way round."""
    from bitsandbytes.nn import modules

    bnb: Any = modules  # bitsandbytes 0.50 annotates none of its classes
    weight = cast(Tensor, linear.weight).detach()
    if not isinstance(linear, nn.Linear):
        weight = weight.T.contiguous()
    out, inp = weight.shape
    with torch.device("meta"):
        found: Any = bnb.Linear4bit(inp, out, linear.bias is not None, compute_dtype=compute)
    found.weight = bnb.Params4bit(
        weight,
        requires_grad=False,
        compress_statistics=config.double_quant,
        quant_type=config.quant_type.value,
        module=found,
    )
    found.bias = linear.bias
    found.stores_transposed = not isinstance(linear, nn.Linear)  # for whoever undoes it
    # bitsandbytes 0.50 would repack the weight for evaluation on a CPU, for good and with scales
    # rounded to bfloat16: training would go on with another model.
    found.support_avx512bf16_for_cpu = False
    return cast(nn.Module, found.to(device))  # quantised on arrival


def _quantise_parameters(experts: nn.Module, config: QLora, device: torch.device) -> None:
    """Matrices of several experts in one parameter: dequantised to float32 at each access."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    for name, parameter in list(experts.named_parameters(recurse=False)):
        if parameter.dim() < 3:
            continue
        parameter.data = parameter.data.to(device)
        replace_parameter_4bit(experts, name, config.double_quant, config.quant_type.value)
        del parameter


def dequantised(layer: nn.Module, delta: Tensor | None = None) -> nn.Module:
    """The float32 layer that a 4-bit one stands for, on the host.

    Args:
        layer: a 4-bit linear layer of `quantise`.
        delta: (out, in), added to the weight.
    """
    from bitsandbytes.functional import dequantize_4bit
    from transformers.pytorch_utils import Conv1D

    mine: Any = layer
    state = getattr(mine.weight, "quant_state", None)
    state = state or mine.quant_state  # FSDP2, which has cut the weight, leaves the layer's
    weight = dequantize_4bit(mine.weight.data.to(state.absmax.device), state).to(torch.float32)
    weight = (weight if delta is None else weight + delta).cpu()
    out, inp = weight.shape
    with torch.device("meta"):
        plain: Any = Conv1D(out, inp) if mine.stores_transposed else nn.Linear(inp, out, bias=False)
    plain.weight = nn.Parameter(weight.T.contiguous() if mine.stores_transposed else weight)
    plain.bias = None if mine.bias is None else nn.Parameter(mine.bias.detach().float().cpu())
    return cast(nn.Module, plain)


def dequantise_rest(model: nn.Module) -> None:
    """Undo `quantise` wherever 4-bit weights are left, in place and on the host."""
    from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

    for name, module in list(model.named_modules()):
        if hasattr(module, "stores_transposed"):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], dequantised(module))
        elif is_parametrized(module):
            for parameter in list(cast(Any, module).parametrizations):
                whole = nn.Parameter(getattr(module, parameter).detach().float().cpu())
                remove_parametrizations(module, parameter, leave_parametrized=False)
                setattr(module, parameter, whole)


def quant_states(model: nn.Module) -> list[Any]:
    """Bitsandbytes' account of each 4-bit tensor, once: scales and their scales."""
    found: dict[int, Any] = {}
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        state = state or getattr(module, "quant_state", None)
        if state is not None:
            found[id(state)] = state
    return list(found.values())


def quant_tensors(model: nn.Module) -> list[Tensor]:
    """What belongs to 4-bit weights beside them; no parameter and no buffer of the model."""
    parts = [part for state in quant_states(model) for part in (state, state.state2) if part]
    return [tensor for part in parts for tensor in (part.absmax, part.code)]
