"""Adapters (peft), float8 linear layers (torchao) and 4-bit weights (bitsandbytes).

The libraries are imported inside the functions, since they are slow to import or optional.
4-bit weights: Dettmers et al. 2023, arXiv:2305.14314.
"""

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
    stacked_experts,
    taken_by_peft,
    why_unfit,
    without_adapters,
)
from eke.training.model.checkpointing import find_layers
from eke.training.model.number_formats import frozen_dtype, kept_in_float32, trained_dtype
from eke.training.model.unused import own_random_numbers

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class _Norm(nn.LayerNorm):
    """Frozen in 16 bits: PyTorch's CPU kernel takes no weights that are narrower than its input."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (p if p is None else p.to(torch.promote_types(p.dtype, input.dtype))
                        for p in (self.weight, self.bias))  # fmt: skip
        return nn.functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


def freeze_named(plan: Plan, model: nn.Module) -> None:
    """Stop training what `model.freeze` names, and give it the planned format; any number of times.

    Raises RunError: an entry names nothing of this class, or nothing is left to train.
    """
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
    """Whether the model is peft's; does not import peft for one that is not."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapter_tensors(
    model: nn.Module, weights: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The trained tensors under their names in the file: the model's own, or those of `weights`."""
    from peft import get_peft_model_state_dict

    # Without a look at the hub for the base model's vocabulary, which is unchanged.
    tensors: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=weights, save_embedding_layers=False
    )
    return tensors


def save_adapter(model: nn.Module, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write peft's configuration and the trained tensors; no model card: it would be empty."""
    mine: Any = model
    config = copy.copy(mine.peft_config["default"])
    config.inference_mode = True
    if taken := taken_by_peft(mine):
        # By parameter plain PEFT loads the same update of the same layer; it asks for no dropout.
        config.target_modules = set(config.target_modules) - taken
        parameters = {*(config.target_parameters or ()), *(f"{name}.weight" for name in taken)}
        config.target_parameters, config.lora_dropout = sorted(parameters), 0.0
    for field in ("target_modules", "feedforward_modules"):
        if isinstance(getattr(config, field, None), set):  # in another order in every process
            setattr(config, field, sorted(getattr(config, field)))
    tensors = {n: t.detach().contiguous() for n, t in adapter_tensors(model, weights).items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a file, one at a time."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # safetensors 0.8: not iterable itself
            yield name, file.get_tensor(name)


def convert_linear_layers(plan: Plan, model: nn.Module, device: torch.device) -> None:
    """Let the model's linear layers multiply in float8, in place; their weights stay as they are.

    Accelerate's recipe: neither the first nor the last one, nor one with a side that is no multiple
    of 16 (`torch._scaled_mm`). On a CPU operands are rounded to float8 and multiplied wider.
    """
    if plan.compute.float8 == "off":
        return
    from accelerate.utils import ao
    from torchao.float8 import Float8LinearConfig

    recipe = Float8LinearConfig.from_recipe_name(plan.compute.float8)
    config = dataclasses.replace(recipe, pad_inner_dim=True, emulate=device.type != "cuda")
    ao.convert_model_to_fp8_ao(model, config=config)


def float8_layers(model: nn.Module) -> list[Any]:
    """The layers that multiply in float8; `config.emulate` of one that rounds alone."""
    from torchao.float8.float8_linear import Float8Linear

    return [module for module in model.modules() if isinstance(module, Float8Linear)]


def is_four_bit(plan: Plan) -> bool:
    """Whether the plan keeps weights in 4 bits."""
    return isinstance(plan.config.peft, QLora)


def quantise(
    plan: Plan, model: nn.Module, device: torch.device, parts: Parts | None = None
) -> nn.Module:
    """Replace the linear layers inside Transformer layers by 4-bit ones, and move to `device`.

    In place, one layer at a time: a GPU never holds more than one float32 weight of them. What
    transformers keeps in float32 stays. Experts, which are one parameter, are dequantised whenever
    the layer runs. Of `parts` each weight is put together, and the rows of its codes are kept: the
    scales are whole on each rank.
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
    found.stores_transposed = not isinstance(linear, nn.Linear)  # read by `dequantise`
    # bitsandbytes 0.50 would repack the weight for evaluation on a CPU, for good and with scales
    # rounded to bfloat16: training would go on with another model.
    found.support_avx512bf16_for_cpu = False
    return cast(nn.Module, found.to(device))  # quantised on arrival


def _quantise_parameters(experts: nn.Module, config: QLora, device: torch.device) -> None:
    """Matrices of several experts in one parameter: dequantised to float32 at each access."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    for name, parameter in list(experts.named_parameters(recurse=False)):
        if parameter.dim() > 2:
            parameter.data = parameter.data.to(device)
            replace_parameter_4bit(experts, name, config.double_quant, config.quant_type.value)


def dequantised(layer: nn.Module, dtype: torch.dtype, delta: Tensor | None = None) -> nn.Module:
    """The layer that a 4-bit one stands for plus `delta` (out, in), on the host, rounded once."""
    from bitsandbytes.functional import dequantize_4bit
    from transformers.pytorch_utils import Conv1D

    mine: Any = layer
    state = getattr(mine.weight, "quant_state", None)
    state = state or mine.quant_state  # FSDP2, which has cut the weight, leaves the layer's
    weight = dequantize_4bit(mine.weight.data.to(state.absmax.device), state).to(torch.float32)
    weight = (weight if delta is None else weight + delta).to(dtype).cpu()
    out, inp = weight.shape
    with torch.device("meta"):
        plain: Any = Conv1D(out, inp) if mine.stores_transposed else nn.Linear(inp, out, bias=False)
    plain.weight = nn.Parameter(weight.T.contiguous() if mine.stores_transposed else weight)
    plain.bias = None if mine.bias is None else nn.Parameter(mine.bias.detach().to(dtype).cpu())
    return cast(nn.Module, plain)


def dequantise_rest(model: nn.Module, dtype: torch.dtype) -> None:
    """Undo `quantise` wherever 4-bit weights are left, in place and on the host."""
    from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

    for name, module in list(model.named_modules()):
        if hasattr(module, "stores_transposed"):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], dequantised(module, dtype))
        elif is_parametrized(module):
            for parameter in list(cast(Any, module).parametrizations):
                whole = nn.Parameter(getattr(module, parameter).detach().to(dtype).cpu())
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
    """Additional tensors of 4-bit weights, which are no parameters or buffers of the model."""
    parts = [part for state in quant_states(model) for part in (state, state.state2) if part]
    return [tensor for part in parts for tensor in (part.absmax, part.code)]


TASK_TYPES: dict[str, str] = {
    "causal_lm": "CAUSAL_LM",
    "masked_lm": "FEATURE_EXTRACTION",
    "sequence_classification": "SEQ_CLS",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
}
"""`task.option` -> peft's name, which chooses the class that loads an adapter."""

CLASSIFIERS = ("score", "classifier", "classification_head", "pooler")
"""Modules of classifiers outside the shared model; poolers start at random, too."""


def apply_peft(plan: Plan, model: nn.Module, parts: Parts | None = None) -> nn.Module:
    """The model with the planned adapters, drawn in float32 by the run's seed; or itself.

    Raises ConfigError: a layer that is asked for is not there, or can have no adapter.
    """
    make = BUILDERS[plan.config.peft.option]
    if make is None:
        return model
    from peft import get_peft_model

    names, targets, left_out = choose_layers(plan, model)
    config = make(plan, names, targets)
    # GPT-2's Conv1D stores its weight the other way round.
    config.fan_in_fan_out = any(
        not isinstance(model.get_submodule(name), nn.Linear) for name in names
    )
    wanted = set(names)
    if getattr(plan.config.peft, "experts", False):
        config.target_parameters = stacked_experts(plan, model)
        wanted |= {name.rpartition(".")[0] for name in config.target_parameters}
    warned = without_adapters(model, wanted, left_out)
    heads = {name.rpartition(".")[2] for name in trained_modules(plan, model)}
    config.modules_to_save = sorted(heads) or None
    config.task_type = TASK_TYPES[plan.config.task.option]
    # For loading; random weights have no name.
    config.base_model_name_or_path = getattr(plan.config.model, "name_or_path", None)
    device = next(model.parameters()).device
    cut = _norms_of_parts(parts) if parts else nullcontext()
    with own_random_numbers(device, plan.config.seed), warnings.catch_warnings(), as_named(), cut:
        # peft 0.21 asks by a name that transformers 5.23 has renamed.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        adapted: Any = get_peft_model(cast(Any, model), config)
    if other := sorted(wanted ^ adapted_modules(adapted)):
        why = f"PEFT {version('peft')} adapts other layers of {type(model).__name__} than planned: "
        why += f"{len(other)} differ, the first is {other[0]}"
        raise ConfigError(Problem("peft", plan.config.peft.option, why, Fix("peft=none")))
    if plan.config.peft.option == "dora" and taken_by_peft(adapted):
        why = f"PEFT {version('peft')} cannot load DoRA of MLPs of {type(model).__name__}"
        warned.append(f"{why}: eke export --merge gives a whole model")
    adapted.without_adapters = warned  # told when training starts
    # peft adds names, repeated or of no module.
    config.modules_to_save = sorted(heads) or None
    _set_formats(plan, adapted)
    return cast(nn.Module, adapted).train()


@contextmanager
def _norms_of_parts(parts: Parts) -> Iterator[None]:
    """Context in which DoRA measures whole weights, one at a time."""
    from peft.tuners.lora.dora import DoraLinearLayer

    measure: Any = DoraLinearLayer.update_layer

    def update(self: Any, *, base_layer: Any, lora_A: Any, lora_B: Any, **more: Any) -> None:
        with parts.whole([base_layer]):
            a, b = (parts.gathered(factor) for factor in (lora_A, lora_B))
            measure(self, base_layer=base_layer, lora_A=a, lora_B=b, **more)

    with patch.object(DoraLinearLayer, "update_layer", update):
        yield


class _Product(torch.autograd.Function):
    """Product with a float32 matrix as under autocast, but keeps no copy of it for backward."""

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
    """One of an adapter's two matrices."""

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        if not torch.is_autocast_enabled(kind):
            return super().forward(input)
        with torch.autocast(kind, enabled=False):
            product: Tensor = cast(Any, _Product).apply(
                input.to(torch.get_autocast_dtype(kind)), self.weight
            )
        return product


def _set_formats(plan: Plan, adapted: nn.Module) -> None:
    """Give the model's own trained tensors their format, and leave the adapters' input as it is.

    peft's float32 copy of what autocast rounds anyway would be kept for backward; DoRA needs it.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    trained, frozen = trained_dtype(plan), frozen_dtype(plan)
    for module in adapted.modules():
        if isinstance(module, ModulesToSaveWrapper):
            cast(nn.Module, module.original_module).to(frozen)
        elif isinstance(module, BaseTunerLayer) and plan.compute.autocast:
            cast(Any, module).cast_input_dtype_enabled = plan.config.peft.option == "dora"
            for factors in (getattr(module, name, {}) for name in ("lora_A", "lora_B")):
                for factor in factors.values():
                    factor.__class__ = _Factor
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.dtype is frozen:
            parameter.data = parameter.data.to(trained)


def trained_modules(plan: Plan, model: nn.Module) -> list[str]:
    """Names of modules trained whole: the head of a classifier, which a checkpoint seldom has."""
    if plan.config.task.option != "sequence_classification":
        return []
    return [n for n, _ in model.named_modules() if n.rpartition(".")[2] in CLASSIFIERS]


def _lora(plan: Plan, names: Mapping[str, str], targets: Targets) -> Any:
    from peft import LoraConfig

    config = cast(Lora, plan.config.peft)
    return LoraConfig(
        r=config.r,
        lora_alpha=cast(int, config.alpha),  # peft computes with it as with any number
        lora_dropout=config.dropout,
        bias=config.bias.value,
        use_rslora=config.use_rslora,
        use_dora=config.option == "dora",
        target_modules=list(names),
    )


def _ia3(plan: Plan, names: Mapping[str, str], targets: Targets) -> Any:
    from peft import IA3Config

    return IA3Config(
        target_modules=list(names),
        feedforward_modules=[n for n, short in names.items() if short in targets.feed_forward],
    )


def merge_adapters(plan: Plan, model: nn.Module) -> nn.Module:
    """The plain model that computes what the adapted one does; the adapted one is used up.

    4-bit weights get the planned format of frozen ones. (peft 0.21's own merging rounds them to 4
    bits again, and fails on a classifier's head with IA3.)
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    adapted: Any = model
    plain: nn.Module = adapted.get_base_model()
    kinds = (BaseTunerLayer, ModulesToSaveWrapper)
    wrapped = [(name, m) for name, m in plain.named_modules() if isinstance(m, kinds)]
    seen: set[nn.Parameter] = set()
    for name, module in wrapped:
        parent, leaf = plain.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if leaf == "base_layer":  # merged with the one around it: experts have one per parameter
            continue
        merged: Any = module
        if isinstance(module, ModulesToSaveWrapper):
            merged = module.modules_to_save["default"]
        while isinstance(merged, BaseTunerLayer):
            layer: Any = merged
            merged = layer.base_layer
            if hasattr(merged, "stores_transposed"):
                delta = layer.get_delta_weight("default")
                merged = dequantised(merged, frozen_dtype(plan), delta)
            else:
                layer.merge()
        if any(p in seen for p in merged.parameters(recurse=False) if p.dim() > 1):
            raise RunError(f"{name} shares its weight with another adapted layer")  # Zamba 2's
        seen |= set(merged.parameters(recurse=False))
        setattr(parent, leaf, merged)
    dequantise_rest(plain, frozen_dtype(plan))
    vars(plain).pop("peft_config", None)
    return plain


def frozen_at_random(model: nn.Module, new_weights: Sequence[str]) -> list[str]:
    """A warning where tensors stay as they were drawn: neither loaded nor trained."""
    every = model.named_parameters(remove_duplicate=False)
    trained = {name for name, p in every if p.requires_grad}
    mine: Any = model
    saved = mine.peft_config["default"].modules_to_save if is_adapted(model) else ()
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
"""`peft` option -> peft's configuration; None trains every weight."""
