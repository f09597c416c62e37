"""Selection of layers for adapters, and the layers that PEFT has adapted."""

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
    """Return whether a module is a matrix product that PEFT can adapt, including GPT-2's Conv1D."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def choose_layers(plan: Plan, model: nn.Module) -> tuple[dict[str, str], Targets, dict[str, str]]:
    """Return names of layers to adapt, the targets, and why other layers cannot be adapted.

    Includes routed experts on request. ConfigError: A layer is missing or unsuitable, or none left.
    """
    peft, layers = cast(Adapters, plan.config.peft), set(find_layers(model))
    typed = peft.target_modules is not None
    routed = typed or getattr(peft, "experts", False)
    # Names inside a layer, so that one name selects the same layer of every block.
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
        why, fix = "no linear layers in its Transformer layers", "peft=none"
    elif typed and (targets.unmatched or not chosen):
        leaves = sorted({name.rpartition(".")[2] for name in names})
        why = f"{', '.join(targets.unmatched) or '[]'} is not a linear layer. Layers: {leaves}"
    elif targets.unmatched or not chosen:
        why, fix = "the layers to scale are unknown", "peft=lora"
    elif unfit and (typed or len(unfit) == len(chosen)):
        name, reason = next(iter(left_out.items()))
        why = f"{name} cannot have an adapter: {reason}"
    if why:
        key, value = "peft", peft.option
        if typed:
            key, value = "peft.target_modules", format_value(peft.target_modules)
        problem = Problem(key, value, f"{type(model).__name__}: {why}", Fix(fix), "not_adaptable")
        raise ConfigError(problem)
    return {n: short for n, short in chosen.items() if n not in unfit}, targets, left_out


def why_unfit(model: nn.Module, name: str) -> str:
    """Return why a linear layer can be neither adapted nor replaced, "" if it can."""
    prefix, _, leaf = name.rpartition(".")
    parent, module = type(model.get_submodule(prefix)), model.get_submodule(name)
    if any(leaf in _read_by(base) for base in parent.__mro__):
        return f"{parent.__name__} reads its weight without calling it"
    return "" if is_product(module) else f"{type(module).__name__} returns more than a product"


def is_product(module: nn.Module) -> bool:
    """Return whether a module is a matrix product with the output of nn.Linear (not a router)."""
    if not is_linear(module) or not type(module).__module__.startswith("transformers.models."):
        return is_linear(module)
    linear = cast(nn.Linear, module)
    try:
        answer = linear(linear.weight.new_zeros(2, 3, linear.in_features))
    except Exception:  # raised by classes with other inputs
        return False
    return isinstance(answer, Tensor) and answer.shape == (2, 3, linear.out_features)


_READ = re.compile(
    r"(?<!isinstance\()(?<!_\()self\.(\w+)\.weight(?=[,)\]]| @|\.T\b|\.(?:t|to|type|float)\()"
)
"""Pattern of a weight passed on unchanged, except to `isinstance` or initialisation (`normal_`).
Slices of weights are in branches that training does not use."""


@cache
def _read_by(kind: type) -> frozenset[str]:
    """Return the modules of a class whose weights its source passes to a function."""
    # Mamba kernels and fused attention take weights and do not call modules: an adapter has no
    # effect.
    known = kind.__module__.partition(".")[0] in ("transformers", "torch")
    return frozenset(_READ.findall(inspect.getsource(kind))) if known else frozenset()


_CONVERSION = "peft.utils.transformers_weight_conversion"
"""PEFT's code for names of transformers 4, in newer versions. PEFT 0.21 applies `mlp.gate_proj` of
a mixture's other layers to its routed experts, which had that name."""


def as_named() -> AbstractContextManager[Any]:
    """Return a context in which PEFT adapts exactly the named layers."""
    if find_spec(_CONVERSION) is None:
        return nullcontext()
    return patch(f"{_CONVERSION}.convert_peft_config_for_transformers", lambda *_, **__: None)


def taken_by_peft(adapted: Any) -> set[str]:
    """Return names of adapted layers that unmodified PEFT would load as routed experts."""
    config = adapted.peft_config["default"]
    if find_spec(_CONVERSION) is None or not hasattr(config, "target_parameters"):
        return set()
    conversion: Any = import_module(_CONVERSION)
    kind = conversion._MODEL_TO_CONVERSION_PATTERN.get(adapted.get_base_model().config.model_type)
    former = conversion._MOE_TARGET_MODULE_MAPPING.get(kind, {})
    return {name for name in config.target_modules if name.rpartition(".")[2] in former}


def adapted_modules(model: nn.Module) -> set[str]:
    """Return names of the base model's modules that have adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    base: nn.Module = cast(Any, model).get_base_model()
    found = (name for name, m in base.named_modules() if isinstance(m, BaseTunerLayer))
    return {name.replace(".base_layer", "") for name in found}


def expert_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return matrices of routed experts by name, one per expert or stacked."""
    return {
        f"{prefix}.{name}": parameter
        for prefix, module in model.named_modules()
        if "experts" in prefix.split(".") or "Expert" in type(module).__name__
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 1 and "bias" not in name
    }


def stacked_experts(plan: Plan, model: nn.Module) -> list[str]:
    """Return names of stacked experts. ConfigError if `peft.experts` is not possible."""
    peft, experts = cast(Any, plan.config.peft), expert_weights(model)
    stacks = [n for n in experts if not is_linear(model.get_submodule(n.rpartition(".")[0]))]
    why, fix = "", "peft.experts=false"
    if not experts:
        why = f"{type(model).__name__} has no routed experts"
    elif stacks and peft.option != "lora":
        why, fix = f"peft={peft.option} does not support stacked experts", "peft=lora"
    elif stacks and peft.dropout:
        why, fix = "stacked experts do not support dropout", "peft.dropout=0"
    if why:
        raise ConfigError(Problem("peft.experts", "true", why, Fix(fix), "not_adaptable"))
    return sorted(stacks)


def missing_adapters(
    model: nn.Module, adapted: Collection[str], left_out: dict[str, str]
) -> list[str]:
    """Return warnings about requested layers without an adapter, and about untrained experts."""
    found = [f"no adapter on {name}: {why}" for name, why in left_out.items()]
    left = {n: p for n, p in expert_weights(model).items() if n.rpartition(".")[0] not in adapted}
    if left:
        # A byte holds two numbers of 4 bits.
        sizes = {p: p.numel() * (1 if p.is_floating_point() else 2) for p in model.parameters()}
        share = sum(sizes[p] for p in left.values()) / sum(sizes.values())
        found.append(
            f"the experts have no adapters: {next(iter(left))} and {len(left) - 1} more, "
            f"{share:.0%} of the parameters, are not trained (peft=lora peft.experts=true)"
        )
    return found
