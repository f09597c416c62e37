"""Adapters (peft), float8 linear layers (torchao) and 4-bit weights (bitsandbytes)."""

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from eke.common.errors import ConfigError, Fix, Problem, RunError
from eke.common.text import format_number
from eke.config.schema import Lora, QLora
from eke.models.freezing import find_problem, is_frozen
from eke.models.sizes import Targets
from eke.plan.planner import Plan
from eke.training.distributed.parts import Parts
from eke.training.model.adapted_layers import (
    adapted_modules,
    as_named,
    choose_layers,
    is_linear,
    missing_adapters,
    stacked_experts,
    taken_by_peft,
    why_unfit,
)
from eke.training.model.checkpointing import find_layers
from eke.training.model.model_checks import preserve_rng_state
from eke.training.model.number_formats import frozen_dtype, kept_in_float32, trained_dtype

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class _Norm(nn.LayerNorm):
    """Layer norm with frozen 16-bit weights: PyTorch's CPU kernel needs the input's format."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (p if p is None else p.to(torch.promote_types(p.dtype, input.dtype))
                        for p in (self.weight, self.bias))  # fmt: skip
        return nn.functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


def freeze_named(plan: Plan, model: nn.Module) -> None:
    """Freeze `model.freeze` and cast it to the planned format. RunError: no match, or none left."""
    entries, narrow = plan.config.model.freeze, frozen_dtype(plan)
    if not entries:
        return
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    weights = {tuple(found): p.requires_grad for p, found in names.items()}
    if problem := find_problem(entries, weights, type(model).__name__):
        raise RunError(ConfigError(problem).short())
    kept = kept_in_float32(model, narrow)
    for parameter in (p for p, found in names.items() if is_frozen(entries, found)):
        parameter.requires_grad_(False)
        if not any(part in names[parameter][0] for part in kept):
            parameter.data = parameter.data.to(narrow)
    for module in model.modules() if narrow is not trained_dtype(plan) else ():
        if type(module) is nn.LayerNorm and any(p.dtype is narrow for p in module.parameters()):
            module.__class__ = _Norm


def is_adapted(model: nn.Module) -> bool:
    """Return whether the model is a PEFT model, without importing peft."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapter_tensors(
    model: nn.Module, weights: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the trained tensors, of the model or `weights`, under their names in the file."""
    from peft import get_peft_model_state_dict

    # The vocabulary is unchanged: do not query the hub for the base model's.
    get: Any = get_peft_model_state_dict
    return cast(dict[str, Tensor], get(model, state_dict=weights, save_embedding_layers=False))


def save_adapter(model: nn.Module, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write peft's configuration and the trained tensors, without an empty model card."""
    config = copy.copy(cast(Any, model).peft_config["default"])
    config.inference_mode = True
    if taken := taken_by_peft(model):
        # As parameters, unmodified PEFT loads the same update of the same layer, but without
        # dropout.
        config.target_modules = set(config.target_modules) - taken
        parameters = {*(config.target_parameters or ()), *(f"{name}.weight" for name in taken)}
        config.target_parameters, config.lora_dropout = sorted(parameters), 0.0
    for field in ("target_modules", "feedforward_modules"):
        if isinstance(getattr(config, field, None), set):  # unordered
            setattr(config, field, sorted(getattr(config, field)))
    tensors = {n: t.detach().contiguous() for n, t in adapter_tensors(model, weights).items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of each tensor of a file, one at a time."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # safetensors 0.8: not iterable itself
            yield name, file.get_tensor(name)


def convert_linear_layers(plan: Plan, model: nn.Module, device: torch.device) -> None:
    """Make linear layers multiply in float8, in place, with unchanged weights.

    Excludes the first and last layer, as in Accelerate, and sides that are not multiples of 16
    (`torch._scaled_mm`). A CPU rounds operands to float8 and multiplies in a wider format.
    """
    if plan.compute.float8 == "off":
        return
    from accelerate.utils import ao
    from torchao.float8 import Float8LinearConfig

    recipe = Float8LinearConfig.from_recipe_name(plan.compute.float8)
    config = dataclasses.replace(recipe, pad_inner_dim=True, emulate=device.type != "cuda")
    ao.convert_model_to_fp8_ao(model, config=config)


def float8_layers(model: nn.Module) -> list[Any]:
    """Return the layers that multiply in float8, or only round if `config.emulate` is true."""
    from torchao.float8.float8_linear import Float8Linear

    return [module for module in model.modules() if isinstance(module, Float8Linear)]


def is_four_bit(plan: Plan) -> bool:
    """Return whether the plan stores weights in 4 bits."""
    return isinstance(plan.config.peft, QLora)


def quantise(plan: Plan, model: nn.Module, device: torch.device, parts: Parts | None) -> nn.Module:
    """Replace linear layers inside Transformer layers by 4-bit layers, in place, on `device`.

    Source: Dettmers et al. 2023, arXiv:2305.14314. Layers are moved one by one: a GPU holds at most
    one of these weights in float32. Stacked experts are dequantised whenever the layer runs. With
    `parts` this rank keeps its rows of the codes, and all scales.
    """
    config = cast(QLora, plan.config.peft)
    compute = getattr(torch, plan.compute.autocast or "float32")
    kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for layer in find_layers(model):
        for name, module in list(layer.named_modules()):
            parent, leaf = layer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            experts = leaf == "experts"
            if experts or (is_linear(module) and leaf not in kept and not why_unfit(layer, name)):
                with parts.whole([module]) if parts else nullcontext():
                    if experts:
                        _quantise_parameters(module, config, device)
                    else:
                        setattr(parent, leaf, _linear(module, config, compute, device))
                if parts:
                    parts.adopt(parent)
    return model.to(device)


def _linear(
    linear: nn.Module, config: QLora, compute: torch.dtype, device: torch.device
) -> nn.Module:
    """Return the 4-bit layer of the same product. Conv1D (GPT-2) stores its weight transposed."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    weight = cast(Tensor, linear.weight).detach()
    if not isinstance(linear, nn.Linear):
        weight = weight.T.contiguous()
    out, inp = weight.shape
    with torch.device("meta"):
        found: Any = Linear4bit(inp, out, linear.bias is not None, compute_dtype=compute)
    found.weight = Params4bit(
        weight,
        requires_grad=False,
        compress_statistics=config.double_quant,
        quant_type=config.quant_type.value,
        module=found,
    )
    found.bias = linear.bias
    found.stores_transposed = not isinstance(linear, nn.Linear)  # read by `dequantise`
    # For evaluation on a CPU, bitsandbytes 0.50 would repack the weight permanently, with scales
    # rounded to bfloat16, and change the model in training.
    found.support_avx512bf16_for_cpu = False
    return cast(nn.Module, found.to(device))  # quantised on arrival


def _quantise_parameters(experts: nn.Module, config: QLora, device: torch.device) -> None:
    """Store matrices of stacked experts in 4 bits, dequantised to float32 at each access."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    for name, parameter in list(experts.named_parameters(recurse=False)):
        if parameter.dim() > 2:
            parameter.data = parameter.data.to(device)
            replace_parameter_4bit(experts, name, config.double_quant, config.quant_type.value)


def _dequantised(layer: Any, dtype: torch.dtype, delta: Tensor | None = None) -> nn.Module:
    """Return the 16- or 32-bit layer of a 4-bit layer plus `delta` [out, in], on the host."""
    from bitsandbytes.functional import dequantize_4bit
    from transformers.pytorch_utils import Conv1D

    state = getattr(layer.weight, "quant_state", None)
    state = state or layer.quant_state  # kept by the layer where FSDP2 has sharded the weight
    weight = dequantize_4bit(layer.weight.data.to(state.absmax.device), state).to(torch.float32)
    weight = (weight if delta is None else weight + delta).to(dtype).cpu()
    (out, inp), transposed = weight.shape, layer.stores_transposed
    with torch.device("meta"):
        plain: Any = Conv1D(out, inp) if transposed else nn.Linear(inp, out, bias=False)
    plain.weight = nn.Parameter(weight.T.contiguous() if transposed else weight)
    plain.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().to(dtype).cpu())
    return cast(nn.Module, plain)


def _dequantise_rest(model: nn.Module, dtype: torch.dtype) -> None:
    """Undo `quantise` for all remaining 4-bit weights, in place and on the host."""
    from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

    for name, module in list(model.named_modules()):
        if hasattr(module, "stores_transposed"):
            model.set_submodule(name, _dequantised(module, dtype))
        elif is_parametrized(module):
            for parameter in list(cast(Any, module).parametrizations):
                whole = nn.Parameter(getattr(module, parameter).detach().to(dtype).cpu())
                remove_parametrizations(module, parameter, leave_parametrized=False)
                setattr(module, parameter, whole)


def quant_states(model: nn.Module) -> list[Any]:
    """Return bitsandbytes' state of each 4-bit tensor, without duplicates."""
    found = (
        getattr(getattr(m, "weight", None), "quant_state", None) or getattr(m, "quant_state", None)
        for m in model.modules()
    )
    return list({id(state): state for state in found if state is not None}.values())


def quant_tensors(model: nn.Module) -> list[Tensor]:
    """Return scales and codes of 4-bit weights, which are not parameters or buffers."""
    parts = [part for state in quant_states(model) for part in (state, state.state2) if part]
    return [tensor for part in parts for tensor in (part.absmax, part.code)]


_TASK_TYPES: dict[str, str] = {
    "causal_lm": "CAUSAL_LM",
    "masked_lm": "FEATURE_EXTRACTION",
    "sequence_classification": "SEQ_CLS",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
}
"""`task.option` -> peft's name, which selects the class that loads an adapter."""

_CLASSIFIERS = ("score", "classifier", "classification_head", "pooler")
"""Modules of classifiers outside the shared model. Poolers are also initialized at random."""


def apply_peft(plan: Plan, model: nn.Module, parts: Parts | None = None) -> nn.Module:
    """Return the model with the planned adapters in float32. ConfigError: a layer is unsuitable."""
    make = BUILDERS[plan.config.peft.option]
    if make is None:
        return model
    from peft import get_peft_model

    names, targets, left_out = choose_layers(plan, model)
    config = make(plan, names, targets)
    # GPT-2's Conv1D stores its weight transposed.
    config.fan_in_fan_out = any(
        not isinstance(model.get_submodule(name), nn.Linear) for name in names
    )
    wanted = set(names)
    if getattr(plan.config.peft, "experts", False):
        config.target_parameters = stacked_experts(plan, model)
        wanted |= {name.rpartition(".")[0] for name in config.target_parameters}
    warned = missing_adapters(model, wanted, left_out)
    heads = {name.rpartition(".")[2] for name in trained_modules(plan, model)}
    config.modules_to_save = sorted(heads) or None
    config.task_type = _TASK_TYPES[plan.targets.option]
    # Needed to load the adapter. A model with random weights has no name.
    config.base_model_name_or_path = getattr(plan.config.model, "name_or_path", None)
    device = next(model.parameters()).device
    cut = _norms_of_parts(parts) if parts else nullcontext()
    with preserve_rng_state(device, plan.config.seed), warnings.catch_warnings(), as_named(), cut:
        # peft 0.21 uses a name that transformers 5.23 has renamed.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        adapted: Any = get_peft_model(cast(Any, model), config)
    if other := sorted(wanted ^ adapted_modules(adapted)):
        why = f"PEFT {version('peft')} adapts other layers of {type(model).__name__} than planned: "
        why += f"{len(other)} differ, the first is {other[0]}"
        problem = Problem("peft", plan.config.peft.option, why, Fix("peft=none"), "not_adaptable")
        raise ConfigError(problem)
    if plan.config.peft.is_dora and taken_by_peft(adapted):
        why = f"PEFT {version('peft')} cannot load DoRA of MLPs of {type(model).__name__}"
        warned.append(f"{why}. Use eke export --merge")
    adapted.without_adapters = warned  # reported when training starts
    # peft adds names that are repeated or of no module.
    config.modules_to_save = sorted(heads) or None
    _set_formats(plan, adapted)
    return cast(nn.Module, adapted).train()


def _norms_of_parts(parts: Parts) -> AbstractContextManager[Any]:
    """Return a context in which DoRA computes norms of full tensors, one at a time."""
    from peft.tuners.lora.dora import DoraLinearLayer

    measure: Any = DoraLinearLayer.update_layer

    def update(self: Any, *, base_layer: Any, lora_A: Any, lora_B: Any, **more: Any) -> None:
        with parts.whole([base_layer]):
            a, b = (parts.gathered(factor) for factor in (lora_A, lora_B))
            measure(self, base_layer=base_layer, lora_A=a, lora_B=b, **more)

    return patch.object(DoraLinearLayer, "update_layer", update)


class _Product(torch.autograd.Function):
    """Product with a float32 matrix as under autocast that keeps no cast copy for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.to(x.dtype).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        of_input = gradient @ weight.to(x.dtype) if ctx.needs_input_grad[0] else None
        of_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        return of_input, of_weight.to(weight.dtype)


class _Factor(nn.Linear):
    """One of the two matrices of an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        if not torch.is_autocast_enabled(kind):
            return super().forward(input)
        narrow = input.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            return cast(Tensor, cast(Any, _Product).apply(narrow, self.weight))


def _set_formats(plan: Plan, adapted: nn.Module) -> None:
    """Cast the base model's trained tensors, and keep the input format of adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    trained, frozen = trained_dtype(plan), frozen_dtype(plan)
    for module in adapted.modules():
        if isinstance(module, ModulesToSaveWrapper):
            cast(nn.Module, module.original_module).to(frozen)
        elif isinstance(module, BaseTunerLayer) and plan.compute.autocast:
            # PEFT would keep a float32 copy of the input for backward, which only DoRA needs.
            cast(Any, module).cast_input_dtype_enabled = plan.config.peft.is_dora
            for factors in (getattr(module, name, {}) for name in ("lora_A", "lora_B")):
                for factor in factors.values():
                    factor.__class__ = _Factor
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.dtype is frozen:
            parameter.data = parameter.data.to(trained)


def trained_modules(plan: Plan, model: nn.Module) -> list[str]:
    """Return names of fully trained modules: a classifier's head, usually not in a checkpoint."""
    if plan.targets.per_token:
        return []
    return [n for n, _ in model.named_modules() if n.rpartition(".")[2] in _CLASSIFIERS]


def _lora(plan: Plan, names: Mapping[str, str], targets: Targets) -> Any:
    from peft import LoraConfig

    config = cast(Lora, plan.config.peft)
    return LoraConfig(
        r=config.r,
        lora_alpha=cast(int, config.alpha),  # peft computes with it as with any number
        lora_dropout=config.dropout,
        bias=config.bias.value,
        use_rslora=config.use_rslora,
        use_dora=config.is_dora,
        target_modules=list(names),
    )


def _ia3(plan: Plan, names: Mapping[str, str], targets: Targets) -> Any:
    from peft import IA3Config

    return IA3Config(
        target_modules=list(names),
        feedforward_modules=[n for n, short in names.items() if short in targets.feed_forward],
    )


def merge_adapters(plan: Plan, model: nn.Module) -> nn.Module:
    """Return the plain model equal to the adapted model, which is consumed.

    4-bit weights get the format of frozen weights. (peft 0.21 would round them to 4 bits again, and
    fails on a classifier's head with IA3.)
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    adapted: Any = model
    plain: nn.Module = adapted.get_base_model()
    kinds = (BaseTunerLayer, ModulesToSaveWrapper)
    wrapped = [(name, m) for name, m in plain.named_modules() if isinstance(m, kinds)]
    seen: set[nn.Parameter] = set()
    for name, module in wrapped:
        if name.endswith(".base_layer"):  # merged with its wrapper: stacked experts have several
            continue
        merged: Any = module
        if isinstance(module, ModulesToSaveWrapper):
            merged = module.modules_to_save["default"]
        while isinstance(merged, BaseTunerLayer):
            layer: Any = merged
            merged = layer.base_layer
            if hasattr(merged, "stores_transposed"):
                delta = layer.get_delta_weight("default")
                merged = _dequantised(merged, frozen_dtype(plan), delta)
            else:
                layer.merge()
        if any(p in seen for p in merged.parameters(recurse=False) if p.dim() > 1):
            raise RunError(f"{name} shares its weight with another adapted layer")  # in Zamba 2
        seen |= set(merged.parameters(recurse=False))
        plain.set_submodule(name, merged)
    _dequantise_rest(plain, frozen_dtype(plan))
    vars(plain).pop("peft_config", None)
    return plain


def warn_random_frozen_weights(model: nn.Module, new_weights: Sequence[str]) -> list[str]:
    """Return a warning about random tensors that are neither loaded nor trained."""
    every = model.named_parameters(remove_duplicate=False)
    trained = {name for name, p in every if p.requires_grad}
    saved = cast(Any, model).peft_config["default"].modules_to_save if is_adapted(model) else ()
    whole = tuple(f".{name}." for name in saved or ())
    frozen = [n for n in new_weights if n not in trained and not any(w in f".{n}" for w in whole)]
    if not frozen:
        return []
    more = ", ..." if len(frozen) > 1 else ""
    why = "only adapters are trained" if is_adapted(model) else "they are frozen"
    return [f"{format_number(len(frozen), 'tensor')} left random, since {why}: {frozen[0]}{more}"]


BUILDERS: dict[str, Callable[[Plan, Mapping[str, str], Targets], Any] | None] = {
    "none": None,
    "lora": _lora,
    "dora": _lora,
    "qlora": _lora,
    "ia3": _ia3,
}
"""`peft` option -> function that builds peft's configuration. None trains all weights."""
