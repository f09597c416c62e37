"""Adapters, by the peft library: few parameters are trained, the model's own are frozen.

peft is imported inside the functions: naming a builder must not cost its import.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from eke.common.errors import RunError
from eke.common.units import format_number
from eke.config.schema import Adapters, Lora, PretrainedModel
from eke.models.sizes import Targets, choose_targets
from eke.plan.planner import Plan
from eke.training.model.adapter_files import is_adapted
from eke.training.model.checkpointing import find_layers
from eke.training.model.four_bit import dequantise_rest, dequantised, is_linear

TASK_TYPES: dict[str, str] = {
    "causal_lm": "CAUSAL_LM",
    "masked_lm": "FEATURE_EXTRACTION",
    "sequence_classification": "SEQ_CLS",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
}
"""`task.option` -> peft's name, which chooses the class that loads an adapter."""

CLASSIFIERS = ("score", "classifier", "classification_head", "pooler")
"""Modules of classifiers beside the model that all tasks share; poolers begin at random, too."""


def apply_peft(plan: Plan, model: nn.Module) -> nn.Module:
    """The model with the planned adapters, or itself; before checkpointing and the optimizer.

    What is frozen is `requires_grad=False`; adapters are float32, drawn by the run's seed.

    Raises:
        RunError: no layer of the model is one that `peft.target_modules` names.
    """
    make = BUILDERS[plan.config.peft.option]
    if make is None:
        return model
    from peft import get_peft_model

    names = _linear_layers(model)
    targets = choose_targets(plan.config, names.values())
    _check(plan, model, targets, sorted(set(names.values())))
    config = make(plan, names, targets)
    config.fan_in_fan_out = any(
        not isinstance(model.get_submodule(name), nn.Linear) for name in names
    )  # GPT-2's Conv1D stores its weight the other way round
    config.modules_to_save = _heads(plan, model)
    config.task_type = TASK_TYPES[plan.config.task.option]
    config.base_model_name_or_path = _base_name(plan)
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(plan.config.seed)
        with warnings.catch_warnings():
            # peft 0.21 asks by a name that transformers 5.23 has renamed.
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            adapted: Any = get_peft_model(cast(Any, model), config)
    if config.modules_to_save:  # peft adds names of its own, repeated or of no module
        config.modules_to_save = _heads(plan, model)
    return cast(nn.Module, adapted).train()


def _linear_layers(model: nn.Module) -> dict[str, str]:
    """Name of each linear layer in a Transformer layer -> its name from that layer on."""
    layers = {id(layer) for layer in find_layers(model)}
    found: dict[str, str] = {}
    for prefix, layer in model.named_modules():
        if id(layer) in layers:
            for name, module in layer.named_modules():
                if is_linear(module):
                    found[f"{prefix}.{name}"] = name
    return found


def _check(plan: Plan, model: nn.Module, targets: Targets, names: list[str]) -> None:
    config = cast(Adapters, plan.config.peft)
    if targets.modules and not targets.unmatched:
        return
    kind = type(model).__name__
    if not names:
        why = f"{kind} has no linear layer in a Transformer layer\n  -> peft=none"
        raise RunError(f"peft = {config.option}: {why}")
    if config.target_modules is None:
        why = f"which layers it scales is not known of {kind}\n  -> peft=lora"
        raise RunError(f"peft = {config.option}: {why}")
    wrong = ", ".join(targets.unmatched) or "[]"
    last = sorted({name.rpartition(".")[2] for name in names})
    raise RunError(
        f"peft.target_modules: {wrong} names no linear layer of {kind}, which has "
        f"{', '.join(last)}\n  -> peft.target_modules=null"
    )


def _heads(plan: Plan, model: nn.Module) -> list[str] | None:
    """Modules trained whole: the head of a classifier, which the checkpoint seldom has."""
    if plan.config.task.option != "sequence_classification":
        return None
    leaves = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return [name for name in CLASSIFIERS if name in leaves]


def _base_name(plan: Plan) -> str | None:
    """What the adapter belongs to, for whoever loads it; random weights have no name."""
    typed = plan.config.model
    return typed.name_or_path if isinstance(typed, PretrainedModel) else None


def _lora(plan: Plan, names: Mapping[str, str], targets: Targets) -> Any:
    """LoraConfig, of dora and qlora, too."""
    from peft import LoraConfig

    config = cast(Lora, plan.config.peft)
    return LoraConfig(
        r=config.r,
        lora_alpha=cast(int, config.alpha),  # peft computes with it as with any number
        lora_dropout=config.dropout,
        bias=config.bias.value,
        use_rslora=config.use_rslora,
        use_dora=config.option == "dora",
        target_modules=_full_names(names, targets.modules),
    )


def _ia3(plan: Plan, names: Mapping[str, str], targets: Targets) -> Any:
    """IA3Config."""
    from peft import IA3Config

    return IA3Config(
        target_modules=_full_names(names, targets.modules),
        feedforward_modules=_full_names(names, targets.feed_forward),
    )


def _full_names(names: Mapping[str, str], wanted: frozenset[str]) -> list[str]:
    """Peft shortens long lists to the endings that mean the same layers."""
    return [name for name, short in names.items() if short in wanted]


def merge_adapters(model: nn.Module) -> nn.Module:
    """The plain model that computes what the adapted one does; the adapted one is used up.

    4-bit weights become float32 on the host, and are not rounded again with the adapters in them.
    (peft 0.21's own merging rounds them, and fails on a classifier's head beside IA3.)
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    adapted: Any = model
    plain: nn.Module = adapted.get_base_model()
    kinds = (BaseTunerLayer, ModulesToSaveWrapper)
    wrapped = [(name, m) for name, m in plain.named_modules() if isinstance(m, kinds)]
    for name, module in wrapped:
        parent, leaf = plain.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if isinstance(module, ModulesToSaveWrapper):
            setattr(parent, leaf, module.modules_to_save["default"])
        else:
            setattr(parent, leaf, _merged(module))
    dequantise_rest(plain)
    vars(plain).pop("peft_config", None)
    return plain


def _merged(layer: Any) -> nn.Module:
    """The layer under an adapter, with the adapter in its weight."""
    base: nn.Module = layer.get_base_layer()
    if hasattr(base, "stores_transposed"):
        return dequantised(base, layer.get_delta_weight("default"))
    layer.merge()
    return base


def frozen_at_random(model: nn.Module, new_weights: Sequence[str]) -> list[str]:
    """A warning where adapters leave tensors as they were drawn, since the checkpoint lacks them.

    Args:
        model: with its adapters.
        new_weights: names in the model without adapters.
    """
    if not is_adapted(model):
        return []
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    mine: Any = model
    whole = tuple(f".{name}." for name in mine.peft_config["default"].modules_to_save or ())
    frozen = [n for n in new_weights if n not in trained and not any(w in f".{n}" for w in whole)]
    if not frozen:
        return []
    more = ", ..." if len(frozen) > 1 else ""
    return [
        f"{format_number(len(frozen), 'tensor')} left random, since only adapters are trained: "
        f"{frozen[0]}{more}"
    ]


def experts_left_out(model: nn.Module) -> list[str]:
    """A warning where experts are one tensor of three dimensions, which no adapter changes."""
    if not is_adapted(model):
        return []
    stacked = [
        (name, p)
        for name, p in model.named_parameters()
        if p.dim() > 2 and not p.requires_grad and "experts" in name.split(".")
    ]
    if not stacked:
        return []
    share = sum(p.numel() for _, p in stacked) / sum(p.numel() for p in model.parameters())
    return [
        f"the experts have no adapters, since they are no linear layers: {stacked[0][0]} and "
        f"{len(stacked) - 1} more, {share:.0%} of the parameters, stay as they are"
    ]


BUILDERS: dict[str, Callable[[Plan, Mapping[str, str], Targets], Any] | None] = {
    "none": None,
    "lora": _lora,
    "dora": _lora,
    "qlora": _lora,
    "ia3": _ia3,
}
"""Option of the group `peft` -> peft's configuration; None trains every weight."""
