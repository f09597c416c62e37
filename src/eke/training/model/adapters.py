"""Adapters (peft), float8 linear layers (torchao) and 4-bit weights (bitsandbytes).

The libraries are imported inside the functions, since they are slow to import or optional.
4-bit weights: Dettmers et al. 2023, arXiv:2305.14314.
"""

import ast
import copy
import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call

from eke.common.errors import ConfigError, Fix, Problem, RunError
from eke.common.text import format_number, format_value
from eke.config.schema import Adapters, Lora, QLora
from eke.models.freezing import find_problem, is_frozen
from eke.models.sizes import Targets, choose_targets
from eke.plan.planner import Plan
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
    if taken := _taken_by_peft(mine):
        # By parameter plain PEFT loads the same update of the same layer; it asks for no dropout.
        config.target_modules = set(config.target_modules) - taken
        parameters = {*(config.target_parameters or ()), *(f"{name}.weight" for name in taken)}
        config.target_parameters, config.lora_dropout = sorted(parameters), 0.0
    if isinstance(config.target_modules, set):  # in another order in every process
        config.target_modules = sorted(config.target_modules)
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


def quantise(plan: Plan, model: nn.Module, device: torch.device) -> nn.Module:
    """Replace the linear layers inside Transformer layers by 4-bit ones, and move to `device`.

    In place, one layer at a time: a GPU never holds more than one float32 weight of them. What
    transformers keeps in float32 stays. Experts, which are one parameter, are dequantised whenever
    the layer runs.
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


def apply_peft(plan: Plan, model: nn.Module) -> nn.Module:
    """The model with the planned adapters, drawn in float32 by the run's seed; or itself.

    Raises ConfigError: a layer that is asked for is not there, or can have no adapter.
    """
    make = BUILDERS[plan.config.peft.option]
    if make is None:
        return model
    from peft import get_peft_model

    names = _linear_layers(plan, model)
    targets = choose_targets(plan.config, names.values())
    _check(plan, model, targets, sorted(set(names.values())))
    config = make(plan, names, targets)
    left_out = _leave_unfit(plan, config, model, names)
    # GPT-2's Conv1D stores its weight the other way round.
    config.fan_in_fan_out = any(
        not isinstance(model.get_submodule(name), nn.Linear) for name in names
    )
    if getattr(plan.config.peft, "experts", False):
        config.target_parameters = _stacked_experts(plan, model, names)
    parameters = getattr(config, "target_parameters", None) or ()
    wanted = {*config.target_modules, *(name.rpartition(".")[0] for name in parameters)}
    config.modules_to_save = _heads(plan, model) or None
    config.task_type = TASK_TYPES[plan.config.task.option]
    # For loading; random weights have no name.
    config.base_model_name_or_path = getattr(plan.config.model, "name_or_path", None)
    device = next(model.parameters()).device
    with own_random_numbers(device, plan.config.seed), warnings.catch_warnings(), _as_named():
        # peft 0.21 asks by a name that transformers 5.23 has renamed.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        adapted: Any = get_peft_model(cast(Any, model), config)
    if other := sorted(wanted ^ _adapted(adapted)):
        why = f"PEFT {version('peft')} adapts other layers of {type(model).__name__} than planned: "
        why += f"{len(other)} differ, the first is {other[0]}"
        raise ConfigError(Problem("peft", plan.config.peft.option, why, Fix("peft=none")))
    adapted.left_out = left_out
    # peft adds names, repeated or of no module.
    config.modules_to_save = _heads(plan, model) or None
    _set_formats(plan, adapted)
    return cast(nn.Module, adapted).train()


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


def _linear_layers(plan: Plan, model: nn.Module) -> dict[str, str]:
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


def _check(plan: Plan, model: nn.Module, targets: Targets, names: list[str]) -> None:
    config = cast(Adapters, plan.config.peft)
    if targets.modules and not targets.unmatched:
        return
    kind, key, value, fix = type(model).__name__, "peft", config.option, Fix("peft=none")
    if not names:
        why = f"{kind} has no linear layer in a Transformer layer"
    elif config.target_modules is None:
        why, fix = f"which layers it scales is not known of {kind}", Fix("peft=lora")
    else:
        key, value = "peft.target_modules", ", ".join(targets.unmatched) or "[]"
        last = sorted({name.rpartition(".")[2] for name in names})
        why = f"names no linear layer of {kind}, which has {', '.join(last)}"
        fix = Fix("peft.target_modules=null")
    raise ConfigError(Problem(key, value, why, fix))


def _leave_unfit(
    plan: Plan, config: Any, model: nn.Module, names: Mapping[str, str]
) -> dict[str, str]:
    """Take layers that can have no adapter from peft's configuration; returns why, by short name.

    Raises ConfigError: they were asked for by name, or none is left.
    """
    unfit = {n: why for n in config.target_modules if (why := _why_unfit(config, model, n))}
    left = [name for name in config.target_modules if name not in unfit]
    found = {names[name]: why for name, why in sorted(unfit.items())}
    typed = cast(Adapters, plan.config.peft).target_modules
    if unfit and (typed is not None or not left):
        kept = [t for t in typed or () if not any(f".{n}".endswith(f".{t}") for n in found)]
        name, why = next(iter(found.items()))
        why = f"{type(model).__name__} has no place for an adapter on {name}: {why}"
        key, fix = ("peft", "peft=none") if typed is None else (
            "peft.target_modules", f"peft.target_modules={format_value(kept) if kept else 'null'}"
        )  # fmt: skip
        value = plan.config.peft.option if typed is None else format_value(typed)
        raise ConfigError(Problem(key, value, why, Fix(fix)))
    for field in ("target_modules", "feedforward_modules"):
        if getattr(config, field, None):
            setattr(config, field, set(getattr(config, field)) - set(unfit))
    return found


def _why_unfit(config: Any, model: nn.Module, name: str) -> str:
    """Why a linear layer can have no adapter; empty if it can."""
    from peft import PEFT_TYPE_TO_TUNER_MAPPING

    module, parts = model.get_submodule(name), name.split(".")
    for end in range(1, len(parts)):
        parent = type(model.get_submodule(".".join(parts[:end])))
        if any(".".join(parts[end:]) in _read_by(base) for base in parent.__mro__):
            return f"{parent.__name__} reads its weight without calling it"
    if not is_product(module):
        return f"{type(module).__name__} answers with more than a product"
    tuner = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
    ask = getattr(tuner, "_check_target_module_compatiblity", None)  # so spelt in peft 0.21
    try:
        if ask is not None:
            ask(None, config, model, parts[-1])
    except ValueError:
        return f"PEFT {version('peft')} refuses it for {cast(Any, model).config.model_type}"
    return ""


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


def _as_named() -> AbstractContextManager[Any]:
    """Context in which PEFT adapts the layers that are named.

    PEFT 0.21 takes `mlp.gate_proj` of a dense or shared layer for the routed experts, which had
    that name in transformers 4, wherever it knows the model type as a mixture.
    """
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # of an older peft
        return nullcontext()
    return patch.object(conversion, "convert_peft_config_for_transformers", lambda *_, **__: None)


def _taken_by_peft(adapted: Any) -> set[str]:
    """Names of adapted layers that plain PEFT would take for routed experts when it loads them."""
    config = adapted.peft_config["default"]
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:
        return set()

    @cache
    def is_taken(leaf: str) -> bool:
        twin = copy.deepcopy(config)
        twin.target_modules = {leaf}
        try:
            conversion.convert_peft_config_for_transformers(twin, adapted.get_base_model(), None)
        except ValueError:  # one of two that the experts have joined
            return True
        return not twin.target_modules

    return {n for n in config.target_modules if is_taken(n.rpartition(".")[2])}


def _adapted(model: nn.Module) -> set[str]:
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


def _stacked_experts(plan: Plan, model: nn.Module, names: Mapping[str, str]) -> list[str]:
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


def trained_modules(plan: Plan, model: nn.Module) -> list[str]:
    """Names of modules trained whole: the head of a classifier, which a checkpoint seldom has."""
    if plan.config.task.option != "sequence_classification":
        return []
    return [n for n, _ in model.named_modules() if n.rpartition(".")[2] in CLASSIFIERS]


def _heads(plan: Plan, model: nn.Module) -> list[str]:
    """Last parts of their names, as peft takes them."""
    leaves = {name.rpartition(".")[2] for name in trained_modules(plan, model)}
    return [name for name in CLASSIFIERS if name in leaves]


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
        target_modules=[name for name, short in names.items() if short in targets.modules],
    )


def _ia3(plan: Plan, names: Mapping[str, str], targets: Targets) -> Any:
    from peft import IA3Config

    return IA3Config(
        target_modules=[name for name, short in names.items() if short in targets.modules],
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


def places_of_adapters(model: nn.Module) -> list[str]:
    """Warnings: layers without an adapter that could be thought to have one."""
    if not is_adapted(model):
        return []
    mine: Any = model
    found: dict[str, list[str]] = {}
    for name, why in mine.left_out.items():
        found.setdefault(why, []).append(name)
    said = [f"no adapter on {', '.join(names)}: {why}" for why, names in found.items()]
    if mine.peft_config["default"].use_dora and _taken_by_peft(mine):
        where = f"PEFT {version('peft')} alone loads some of these adapters into the experts"
        said.append(f"{where}; eke export --merge gives a model that needs no PEFT")
    adapted = _adapted(model)
    stacks = [(name, p) for name, p in _stacks(mine.get_base_model()).items()
              if not p.requires_grad
              and name.rpartition(".")[0].replace(".base_layer", "") not in adapted]  # fmt: skip
    if not stacks:
        return said
    share = sum(p.numel() for _, p in stacks) / sum(p.numel() for p in model.parameters())
    return [
        *said,
        f"the experts have no adapters: {stacks[0][0]} and {len(stacks) - 1} more, {share:.0%} of "
        "the parameters, stay as they are (peft.experts=true adapts them)",
    ]


BUILDERS: dict[str, Callable[[Plan, Mapping[str, str], Targets], Any] | None] = {
    "none": None,
    "lora": _lora,
    "dora": _lora,
    "qlora": _lora,
    "ia3": _ia3,
}
"""`peft` option -> peft's configuration; None trains every weight."""
