"""Layers that adapters are put on: those that are asked for, those that can, and what PEFT made."""

import inspect
import re
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast
from unittest.mock import patch

from torch import Tensor, nn

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import format_value
from eke.config.schema import Adapters
from eke.models.sizes import Targets, choose_targets
from eke.plan.planner import Plan
from eke.training.model.checkpointing import find_layers


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix product that adapters are made for: GPT-2's class, too."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def choose_layers(plan: Plan, model: nn.Module) -> tuple[dict[str, str], Targets, dict[str, str]]:
    """Map the names of adapted layers to their names in a Transformer layer, and others to why not.

    Routed experts are among them only if they are asked for. Raises ConfigError: a layer that is
    typed is not there or cannot have an adapter, or none is left.
    """
    peft, layers = cast(Adapters, plan.config.peft), set(find_layers(model))
    typed = peft.target_modules is not None
    routed = typed or getattr(peft, "experts", False)
    names = {
        f"{prefix}.{name}": name
        for prefix, layer in model.named_modules()
        if layer in layers
        for name, module in layer.named_modules()
        if is_linear(module) and (routed or "experts" not in name.split("."))
    }
    targets = choose_targets(plan.config, names.values())
    chosen = {name: short for name, short in names.items() if short in targets.modules}
    unfit = {name: why for name in chosen if (why := why_unfit(model, name))}
    left_out = {chosen[name]: why for name, why in unfit.items()}
    why, fix = "", "peft.target_modules=null" if typed else "peft=none"
    if not names:
        why, fix = "it has no linear layer in a Transformer layer", "peft=none"
    elif typed and (targets.unmatched or not chosen):
        leaves = sorted({name.rpartition(".")[2] for name in names})
        why = f"{', '.join(targets.unmatched) or '[]'} names no linear layer among {leaves}"
    elif targets.unmatched or not chosen:
        why, fix = "which layers it scales is not known", "peft=lora"
    elif unfit and (typed or len(unfit) == len(chosen)):
        name, reason = next(iter(left_out.items()))
        why = f"no place for an adapter on {name}: {reason}"
    if why:
        key, value = "peft", peft.option
        if typed:
            key, value = "peft.target_modules", format_value(peft.target_modules)
        raise ConfigError(Problem(key, value, f"{type(model).__name__}: {why}", Fix(fix)))
    return {n: short for n, short in chosen.items() if n not in unfit}, targets, left_out


def why_unfit(model: nn.Module, name: str) -> str:
    """Why a linear layer can be neither adapted nor replaced; empty if it can."""
    prefix, _, leaf = name.rpartition(".")
    parent, module = type(model.get_submodule(prefix)), model.get_submodule(name)
    if any(leaf in _read_by(base) for base in parent.__mro__):
        return f"{parent.__name__} reads its weight without calling it"
    return "" if is_product(module) else f"{type(module).__name__} answers with more than a product"


def is_product(module: nn.Module) -> bool:
    """Whether a module is a matrix product that answers as nn.Linear does: no router."""
    if not is_linear(module) or not type(module).__module__.startswith("transformers.models."):
        return is_linear(module)
    linear = cast(nn.Linear, module)
    try:
        answer = linear(linear.weight.new_zeros(2, 3, linear.in_features))
    except Exception:  # of a class that takes other inputs
        return False
    return isinstance(answer, Tensor) and answer.shape == (2, 3, linear.out_features)


_READ = re.compile(
    r"(?<!isinstance\()(?<!_\()self\.(\w+)\.weight(?=[,)\]]| @|\.T\b|\.(?:t|to|type|float)\()"
)
"""A weight that is handed on as it is, but not to `isinstance` or an initialisation (`normal_`).

Slices are branches that training does not take.
"""


@cache
def _read_by(kind: type) -> frozenset[str]:
    """Modules of a class whose weights its source hands on.

    Kernels of Mamba's kind and fused attention take weights, and call no module: an adapter there
    would change nothing.
    """
    known = kind.__module__.partition(".")[0] in ("transformers", "torch")
    return frozenset(_READ.findall(inspect.getsource(kind))) if known else frozenset()


_CONVERSION = "peft.utils.transformers_weight_conversion"
"""PEFT's code for names of transformers 4, which older versions lack.

PEFT 0.21 takes `mlp.gate_proj` of a dense or shared layer for the routed experts, which had that
name then, wherever it knows the model type as a mixture.
"""


def as_named() -> AbstractContextManager[Any]:
    """Context in which PEFT adapts the layers that are named."""
    if find_spec(_CONVERSION) is None:
        return nullcontext()
    return patch(f"{_CONVERSION}.convert_peft_config_for_transformers", lambda *_, **__: None)


def taken_by_peft(adapted: Any) -> set[str]:
    """Names of adapted layers that plain PEFT would take for routed experts when it loads them."""
    config = adapted.peft_config["default"]
    if find_spec(_CONVERSION) is None or not hasattr(config, "target_parameters"):
        return set()
    conversion: Any = import_module(_CONVERSION)
    kind = conversion._MODEL_TO_CONVERSION_PATTERN.get(adapted.get_base_model().config.model_type)
    former = conversion._MOE_TARGET_MODULE_MAPPING.get(kind, {})
    return {name for name in config.target_modules if name.rpartition(".")[2] in former}


def adapted_modules(model: nn.Module) -> set[str]:
    """Names of the base model's modules that have adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    base: nn.Module = cast(Any, model).get_base_model()
    found = (name for name, m in base.named_modules() if isinstance(m, BaseTunerLayer))
    return {name.replace(".base_layer", "") for name in found}


def expert_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Matrices of routed experts, one each or all in one parameter."""
    return {
        f"{prefix}.{name}": parameter
        for prefix, module in model.named_modules()
        if "experts" in prefix.split(".") or "Expert" in type(module).__name__
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 1 and "bias" not in name
    }


def stacked_experts(plan: Plan, model: nn.Module) -> list[str]:
    """The stacked experts, for PEFT; ConfigError where `peft.experts` cannot be followed."""
    peft, experts = cast(Any, plan.config.peft), expert_weights(model)
    stacks = [n for n in experts if not is_linear(model.get_submodule(n.rpartition(".")[0]))]
    why, fix = "", "peft.experts=false"
    if not experts:
        why = f"{type(model).__name__} has no routed experts"
    elif stacks and peft.option != "lora":
        why, fix = f"peft={peft.option} has no form for experts that are one tensor", "peft=lora"
    elif stacks and peft.dropout:
        why, fix = "the update of stacked experts has no input to drop", "peft.dropout=0"
    if why:
        raise ConfigError(Problem("peft.experts", "true", why, Fix(fix)))
    return sorted(stacks)


def without_adapters(
    model: nn.Module, adapted: Collection[str], left_out: dict[str, str]
) -> list[str]:
    """Warnings: layers without an adapter that could be thought to have one."""
    found = [f"no adapter on {name}: {why}" for name, why in left_out.items()]
    left = {n: p for n, p in expert_weights(model).items() if n.rpartition(".")[0] not in adapted}
    if left:
        # A byte holds two numbers of 4 bits.
        sizes = {p: p.numel() * (1 if p.is_floating_point() else 2) for p in model.parameters()}
        share = sum(sizes[p] for p in left.values()) / sum(sizes.values())
        found.append(
            f"the experts have no adapters: {next(iter(left))} and {len(left) - 1} more, "
            f"{share:.0%} of the parameters, stay as they are (peft=lora peft.experts=true)"
        )
    return found
