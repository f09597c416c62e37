"""Layers that adapters are put on: those that are asked for, those that can, and what PEFT made."""

import ast
import copy
import inspect
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.func import functional_call

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import format_value
from eke.config.schema import Adapters, Lora
from eke.models.sizes import Targets
from eke.plan.planner import Plan
from eke.training.model.checkpointing import find_layers


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix product that adapters are made for: GPT-2's class, too."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def linear_modules(plan: Plan, model: nn.Module) -> dict[str, str]:
    """Name of each linear layer in a Transformer layer -> its name from that layer on.

    Those of routed experts only if they are asked for.
    """
    layers, peft = set(find_layers(model)), cast(Adapters, plan.config.peft)
    routed = peft.target_modules is not None or getattr(peft, "experts", False)
    return {
        f"{prefix}.{name}": name
        for prefix, layer in model.named_modules()
        if layer in layers
        for name, module in layer.named_modules()
        if is_linear(module) and (routed or "experts" not in name.split("."))
    }


def check_targets(plan: Plan, model: nn.Module, targets: Targets, names: list[str]) -> None:
    """Raise ConfigError unless there are such layers."""
    config, kind = cast(Adapters, plan.config.peft), type(model).__name__
    if targets.modules and not targets.unmatched:
        return
    if names and config.target_modules is not None:
        last = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
        why, value = f"names no linear layer of {kind}, which has {last}", targets.unmatched
        fix = Fix("peft.target_modules=null")
        raise ConfigError(Problem("peft.target_modules", ", ".join(value) or "[]", why, fix))
    why, fix = f"which layers it scales is not known of {kind}", Fix("peft=lora")
    if not names:
        why, fix = f"{kind} has no linear layer in a Transformer layer", Fix("peft=none")
    raise ConfigError(Problem("peft", config.option, why, fix))


def leave_unfit(
    plan: Plan, config: Any, model: nn.Module, names: Mapping[str, str]
) -> dict[str, str]:
    """Take layers that can have no adapter from peft's configuration; returns why, by short name.

    Raises ConfigError: they were asked for by name, or none is left.
    """
    unfit = {n: why for n in config.target_modules if (why := _why_refused(config, model, n))}
    found = {names[name]: why for name, why in sorted(unfit.items())}
    typed = cast(Adapters, plan.config.peft).target_modules
    if unfit and (typed is not None or len(unfit) == len(config.target_modules)):
        kept = [t for t in typed or () if not any(f".{n}".endswith(f".{t}") for n in found)]
        name, why = next(iter(found.items()))
        why = f"{type(model).__name__} has no place for an adapter on {name}: {why}"
        if typed is None:
            raise ConfigError(Problem("peft", plan.config.peft.option, why, Fix("peft=none")))
        key, fix = "peft.target_modules", format_value(kept) if kept else "null"
        raise ConfigError(Problem(key, format_value(typed), why, Fix(f"{key}={fix}")))
    for field in ("target_modules", "feedforward_modules"):
        if getattr(config, field, None):
            setattr(config, field, set(getattr(config, field)) - set(unfit))
    return found


def why_unfit(model: nn.Module, name: str) -> str:
    """Why a linear layer can be neither adapted nor replaced; empty if it can."""
    parts = name.split(".")
    for end in range(len(parts)):
        parent = type(model.get_submodule(".".join(parts[:end])))
        if any(".".join(parts[end:]) in _read_by(base) for base in parent.__mro__):
            return f"{parent.__name__} reads its weight without calling it"
    module = model.get_submodule(name)
    return "" if is_product(module) else f"{type(module).__name__} answers with more than a product"


def _why_refused(config: Any, model: Any, name: str) -> str:
    """The same for what PEFT makes no adapter for."""
    from peft import PEFT_TYPE_TO_TUNER_MAPPING

    tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
    try:
        if ask := getattr(tuner, "_check_target_module_compatiblity", None):  # so spelt in 0.21
            ask(None, config, model, name.rpartition(".")[2])
    except ValueError:
        return f"PEFT {version('peft')} refuses it for {model.config.model_type}"
    return why_unfit(model, name)


def is_product(module: nn.Module) -> bool:
    """Whether a module is a matrix product that answers as nn.Linear does: no router."""
    if not is_linear(module):
        return False
    if not type(module).__module__.startswith("transformers.models."):
        return True
    linear = cast(nn.Linear, module)
    rows = torch.empty(2, 3, linear.in_features, device="meta")
    weights = {name: p.to("meta") for name, p in module.named_parameters()}
    try:
        answer = functional_call(module, weights, (rows,))
    except Exception:  # of a class that takes other inputs
        return False
    return isinstance(answer, Tensor) and answer.shape == (2, 3, linear.out_features)


@cache
def _reads(path: str) -> dict[str, frozenset[str]]:
    """Class of a file -> its modules, as named in it, whose weights are handed on as they are.

    Kernels of Mamba's kind and fused attention take weights, and call no module: an adapter there
    would change nothing. Slices are left alone: those are of branches that training does not take.
    """
    found = {}
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    for definition in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        given: list[ast.expr] = []
        for node in ast.walk(definition):
            if isinstance(node, ast.BinOp):
                given += [node.left, node.right]
            elif isinstance(node, ast.List):
                given += node.elts
            elif isinstance(node, ast.Call) and not _ASKS.search(ast.unparse(node.func)):
                given += [*node.args, *(keyword.value for keyword in node.keywords)]
        read = (_WEIGHT.fullmatch(ast.unparse(each)) for each in given)
        found[definition.name] = frozenset(match[1] for match in read if match)
    return found


_ASKS = re.compile(r"^(isinstance|hasattr|getattr)$|\binit\.|_init")
"""Calls that look at a weight, or give it its first value."""

_WEIGHT = re.compile(r"self\.([\w.]+)\.weight(\.T|\.(t|to|type|float)\(.*\))?")


def _read_by(kind: type) -> frozenset[str]:
    """The same for one class, of transformers or torch alone."""
    if kind.__module__.partition(".")[0] not in ("transformers", "torch") or kind is nn.Module:
        return frozenset()
    return _reads(inspect.getfile(kind)).get(kind.__name__, frozenset())


def _conversion() -> Any:
    """PEFT's code for names of transformers 4; None in a peft that has none.

    PEFT 0.21 takes `mlp.gate_proj` of a dense or shared layer for the routed experts, which had
    that name then, wherever it knows the model type as a mixture.
    """
    with suppress(ImportError):
        from peft.utils import transformers_weight_conversion as conversion

        return conversion


def as_named() -> AbstractContextManager[Any]:
    """Context in which PEFT adapts the layers that are named."""
    if (conversion := _conversion()) is None:
        return nullcontext()
    return patch.object(conversion, "convert_peft_config_for_transformers", lambda *_, **__: None)


def taken_by_peft(adapted: Any) -> set[str]:
    """Names of adapted layers that plain PEFT would take for routed experts when it loads them."""
    config, conversion = adapted.peft_config["default"], _conversion()

    @cache
    def is_taken(leaf: str) -> bool:
        twin = copy.deepcopy(config)
        twin.target_modules = {leaf}
        try:
            conversion.convert_peft_config_for_transformers(twin, adapted.get_base_model(), None)
        except ValueError:  # one of two that the experts have joined
            return True
        return not twin.target_modules

    return {n for n in config.target_modules if conversion and is_taken(n.rpartition(".")[2])}


def adapted_modules(model: nn.Module) -> set[str]:
    """Names of the base model's modules that have adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    base: nn.Module = cast(Any, model).get_base_model()
    found = (name for name, m in base.named_modules() if isinstance(m, BaseTunerLayer))
    return {name.replace(".base_layer", "") for name in found}


def _stacks(model: nn.Module) -> dict[str, nn.Parameter]:
    """Matrices of routed experts, one each or all in one parameter."""
    return {
        f"{prefix}.{name}": parameter
        for prefix, module in model.named_modules()
        if "experts" in prefix.split(".") or "Expert" in type(module).__name__
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 1 and "bias" not in name
    }


def stacked_experts(plan: Plan, model: nn.Module, names: Mapping[str, str]) -> list[str]:
    """The stacked experts, for PEFT; ConfigError where `peft.experts` cannot be followed."""
    peft = cast(Lora, plan.config.peft)
    stacks = sorted(n for n in _stacks(model) if n.removesuffix(".weight") not in names)
    why, fix = "", "peft.experts=false"
    if not stacks and not any("experts" in name.split(".") for name in names):
        why = f"{type(model).__name__} has no routed experts"
    elif stacks and peft.option != "lora":
        why, fix = f"peft={peft.option} has no form for experts that are one tensor", "peft=lora"
    elif stacks and peft.dropout:
        why, fix = "the update of stacked experts has no input to drop", "peft.dropout=0"
    if why:
        raise ConfigError(Problem("peft.experts", "true", why, Fix(fix)))
    return stacks


def places_of_adapters(model: nn.Module) -> list[str]:
    """Warnings: layers without an adapter that could be thought to have one."""
    mine: Any = model
    if not hasattr(model, "left_out"):
        return []
    said = [f"no adapter on {name}: {why}" for name, why in mine.left_out.items()]
    adapted = adapted_modules(model)
    stacks = {n: p.numel() for n, p in _stacks(mine.get_base_model()).items() if not p.requires_grad
              and n.rpartition(".")[0].replace(".base_layer", "") not in adapted}  # fmt: skip
    if stacks:
        share = sum(stacks.values()) / sum(p.numel() for p in model.parameters())
        said.append(
            f"the experts have no adapters: {next(iter(stacks))} and {len(stacks) - 1} more, "
            f"{share:.0%} of the parameters, stay as they are (peft=lora peft.experts=true)"
        )
    return said
