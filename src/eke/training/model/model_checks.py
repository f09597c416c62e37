"""Checks and corrections of a built model: unused parameters, experts, padding, heads."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from eke.common.errors import RunError
from eke.training.model.checkpointing import find_layers


def has_experts(model: nn.Module) -> bool:
    """Return whether a feed-forward layer of the model routes tokens to experts."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())


def routed_parents(model: nn.Module) -> list[nn.Module]:
    """Return modules that route tokens to some of several modules of equal class and shapes."""
    layers = find_layers(model)
    inner = {id(m): m for layer in layers for m in layer.modules() if m is not layer}
    return [m for m in inner.values() if any(map(_is_routed, m.children()))]


def routed_siblings(model: nn.Module) -> list[list[nn.Module]]:
    """Return the equal modules in each container of `routed_parents`."""
    containers = (c for parent in routed_parents(model) for c in parent.children())
    return [_with_parameters(container) for container in containers if _is_routed(container)]


def _is_routed(module: nn.Module) -> bool:
    experts = _with_parameters(module)
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(experts) < 2:
        return False
    kinds = {(type(m), *((n, tuple(p.shape)) for n, p in m.named_parameters())) for m in experts}
    return len(kinds) == 1


def _with_parameters(module: nn.Module) -> list[nn.Module]:
    """Return children with parameters: NLLB-MoE keeps a dropout among its experts."""
    return [m for m in module.children() if any(True for _ in m.parameters())]


def add_zero_gradients(module: nn.Module, late: bool) -> None:
    """Give each parameter of the module a gradient in every backward pass, zero if unused."""

    # ZeRO-2 exchanges gradients in the order of their completion, which must be equal on all ranks.
    # With zeros added to the input, all gradients are complete after the module's backward pass.
    # ZeRO-3 has the weights only inside the module, so `late` adds the zeros to the output.
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
    """Make autocast cast the operands of the experts' product, in this process, once."""
    # Autocast does not support `grouped_mm`. Tested with transformers 5.23.
    # tests/unit/training/model/test_experts.py detects a version without it.
    if not has_experts(model):
        return
    from transformers.integrations import moe

    multiply: Any = getattr(moe, "_grouped_mm", None)
    if multiply is None or hasattr(multiply, "__wrapped__"):
        return

    @functools.wraps(multiply)
    def product(input: Tensor, weight: Tensor, offs: Tensor) -> Any:
        kind = weight.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            input, weight = input.to(dtype), weight.to(dtype)
        return multiply(input, weight, offs)

    vars(moe)["_grouped_mm"] = product


def freeze_unused(model: nn.Module) -> None:
    """Freeze a parameter of BERT without effect. Other known families have none (tested)."""
    if type(model).__name__ == "BertForMaskedLM":
        # A second output bias, in addition to the decoder's, if embeddings are not tied.
        name = "cls.predictions.bias"
        parameter = model.get_parameter(name)
        everything = model.named_parameters(remove_duplicate=False)
        if [n for n, p in everything if p is parameter] == [name]:
            parameter.requires_grad_(False)


def freeze_unreached(model: nn.Module) -> tuple[str, ...]:
    """Freeze parameters without gradient, which DDP would wait for, and return their names."""
    reached: set[int] = set()
    with preserve_rng_state(next(model.parameters()).device):
        for seed in range(3):  # a parameter must be missing for all of these tokens
            reached |= _leaves(model(**probe_inputs(model, seed)).logits)
    # An expert is reached if one of its siblings is, because other tokens are routed to it.
    for siblings in routed_siblings(model):
        for alike in zip(*(module.parameters() for module in siblings), strict=True):
            if any(id(p) in reached for p in alike):
                reached |= set(map(id, alike))
    frozen = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in reached}
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    return tuple(frozen)


def probe_inputs(
    model: nn.Module, seed: int, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Return four rows of eight varied tokens that end in the model's end of text."""
    config: Any = model.config
    device = device or next(model.parameters()).device
    table = getattr(model, "get_input_embeddings", lambda: None)()
    vocabulary = int(getattr(table, "num_embeddings", config.vocab_size))
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    special = {*ends, config.pad_token_id}
    plain = [token for token in range(vocabulary) if token not in special] or [0]
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(plain), (4, 8), generator=generator)
    ids = torch.tensor(plain)[chosen].to(device)
    if isinstance(ends[0], int) and 0 <= ends[0] < vocabulary:
        ids[:, -1] = ends[0]
    inputs = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    return inputs


@contextmanager
def preserve_rng_state(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Keep the caller's random state unchanged, and start from a seed if given."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()  # false in a memory trace
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def _leaves(output: Tensor) -> set[int]:
    """Return ids of the tensors that gradients of `output` are accumulated into."""
    seen: set[Any] = set()
    waiting: list[Any] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {id(node.variable) for node in seen if hasattr(node, "variable")}


@torch.no_grad()
def padding_side(model: nn.Module, task: str, pad: int) -> str:
    """Return the side where padding changes no output, or "". RunError: Padding is impossible."""
    # XLNet classifies by the last position, even if padded, and FNet mixes padding into every
    # token.
    whole = probe_inputs(model, 0)["input_ids"][:2]
    ids = whole[:, -5:]  # with the end of text that some classifiers pool at
    alone = _logits(model, task, ids, ids)
    if not _alike(alone, _logits(model, task, ids, ids)):
        return "right"  # random hashing, which cannot be checked
    filler = torch.full_like(whole[:, 5:], pad)
    sides = {"right": [ids, filler], "left": [filler, ids]}
    if task == "seq2seq_lm":
        del sides["left"]  # a decoder's inputs are shifted labels
    for side, parts in sides.items():
        padded = torch.cat(parts, 1)
        mask = torch.cat([torch.full_like(part, part is ids) for part in parts], 1)
        try:
            found = _logits(model, task, padded, ids, attention_mask=mask)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # XLNet with attn_type=uni adds masks of different shapes
            why = f"{type(model).__name__} does not support padded rows"
            raise RunError(f"{why} -> batch.per_device=1 batch.eval_per_device=1") from error
        if found.dim() == 3 and found.shape[1] == whole.shape[1]:
            found = found[mask.bool()].view(*ids.shape, -1)
        if found.shape == alone.shape and _alike(alone, found):
            return side
    return ""


@torch.no_grad()
def check_positions(model: nn.Module, task: str) -> None:
    """Raise RunError unless each token has an output, in causal_lm independent of later tokens."""
    if task not in ("causal_lm", "masked_lm"):
        return
    ids = probe_inputs(model, 0)["input_ids"][:1]
    found = _logits(model, task, ids, ids)
    name = type(model).__name__
    if found.shape[1] != ids.shape[1]:
        why = f"{name} returns {found.shape[1]} outputs for {ids.shape[1]} tokens"
        raise RunError(f"task = {task}: {why} -> another checkpoint")
    # BERT's class for causal_lm attends to the tokens that it predicts.
    other = ids.clone()
    other[:, -1] = ids[0, (ids[0] != ids[0, -1]).int().argmax()]
    if task == "causal_lm" and not _alike(found[:, :-1], _logits(model, task, other, ids)[:, :-1]):
        why = f"{name} attends to the tokens that it predicts"
        fix = "is_decoder = true in its config.json, or task=masked_lm"
        raise RunError(f"task = causal_lm: {why} -> {fix}")


@torch.no_grad()
def check_packing(model: nn.Module) -> None:
    """Raise RunError unless samples that share a row have the outputs of separate rows."""
    ids = probe_inputs(model, 0)["input_ids"][:2]
    places = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids))[None]
    apart = _logits(model, "causal_lm", ids, ids)
    try:
        # With a cache transformers 5 treats the row as one sample. Training has no cache.
        packed = model(ids.reshape(1, -1), position_ids=places, use_cache=False).logits
        kept = _alike(apart, packed.view_as(apart))
    except (TypeError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        kept = False
    if not kept:
        why = f"{type(model).__name__} does not separate samples by their positions"
        raise RunError(f"data.packing: {why} -> data.packing=off")


@torch.no_grad()
def check_head(model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Raise RunError unless a model with a `_LossHead` has the loss that its logits give."""
    inputs = probe_inputs(model, 0)
    labels = inputs["input_ids"]
    with preserve_rng_state(labels.device):
        expected = loss_of(model(**inputs).logits, labels)
        found = model(**inputs, labels=labels).logits
    if found.dim() or not _alike(expected, found):
        why = f"{type(model).__name__} changes its logits after the projection"
        raise RunError(f"kernels: {why}, so its head cannot compute the loss -> kernels=none")


@torch.no_grad()
def check_copies(model: nn.Module, copies: AbstractContextManager[Any]) -> None:
    """Raise RunError unless a model computes with 16-bit copies. DebertaV2 mixes formats."""
    inputs = probe_inputs(model, 0)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    try:
        with preserve_rng_state(inputs["input_ids"].device), copies:
            model(**inputs)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        why = f"{type(model).__name__} mixes 16-bit weights with other formats"
        raise RunError(f"precision.casts: {why} -> precision.casts=per_use") from error


def _logits(model: Any, task: str, ids: Tensor, target: Tensor, **more: Tensor) -> Tensor:
    if task == "seq2seq_lm":
        more["decoder_input_ids"] = target
    with preserve_rng_state(ids.device):
        logits: Tensor = model(input_ids=ids, **more).logits
    return logits


def _alike(one: Tensor, other: Tensor) -> bool:
    # Rounding of float32 on a CPU, of TF32 on a GPU, or of several bfloat16 operations.
    tolerance = 1e-4 if one.device.type == "cpu" else 2e-2
    tolerance = tolerance if one.dtype is torch.float32 else 4e-2
    return bool((one - other).abs().max() <= tolerance * one.abs().max().clamp(min=1e-3))


def drawn_in_float32(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return a context in which weights of this format are drawn in float32, then rounded."""
    if dtype is torch.float32:
        return nullcontext()
    # PyTorch's CPU generator draws other numbers for bfloat16 (2.11: always, 2.13: the last numbers
    # of a size not divisible by 16): runs in two formats would start differently.
    return _InFloat32()  # type: ignore[no-untyped-call]  # torch 2.13


class _InFloat32(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch 2.13
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The in-place draws in the initialisations of transformers and PyTorch.
        draws = (torch.ops.aten.normal_, torch.ops.aten.uniform_)
        if func.overloadpacket not in draws or args[0].dtype is torch.float32:
            return func(*args, **(kwargs or {}))
        narrow, *how = args
        wide = torch.empty_like(narrow, dtype=torch.float32)
        func(wide, *how, **(kwargs or {}))
        return narrow.copy_(wide)


HEADS: dict[str, str] = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
}
"""`task.option` -> transformers' class with that head."""
