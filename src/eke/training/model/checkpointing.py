"""Activation checkpointing and its detection.

Full: repeat each layer's forward pass in backward (Chen et al. 2016, arXiv:1604.06174). Selective:
keep expensive results (Korthikanti et al. 2022, arXiv:2205.05198, section 5).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from eke.common.errors import RunError
from eke.config.schema import Checkpointing
from eke.plan.planner import Plan
from eke.training.custom import is_plain, origin_of

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts of the first and of the second forward pass."""

_MakeContexts = Callable[[], _Contexts]

KEPT = frozenset(
    {
        "mm",
        "addmm",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "flex_attention",
    }
)
"""Operations whose results selective checkpointing keeps: linear layers and fused attention, which
take most of the time. Not `bmm`: scores of unfused attention grow with the length's square."""


_MARKED: ContextVar[bool] = ContextVar("marked", default=False)


def is_repeating() -> bool:
    """Return whether the current operation repeats a forward pass inside a backward pass."""
    # The id of the current backward pass, -1 outside. torch's checkpointing also reads it.
    if torch._C._current_graph_task_id() == -1:
        return False
    # Autograd's own operations run without gradients, a repeated forward pass with them. Inside an
    # autograd function, such as ZeRO-3's linear layers, gradients are off and the pass is marked.
    return torch.is_grad_enabled() or _MARKED.get()


def marked() -> _Contexts:
    """Return contexts that keep no results and mark the second pass."""
    return nullcontext(), _Marked(nullcontext())


def selective() -> _Contexts:
    """Return contexts that keep results of `KEPT`. Both passes must run the same operations."""
    make: Callable[..., _Contexts] = create_selective_checkpoint_contexts
    first, again = make(_keep_expensive)
    first.__class__ = _Keeping
    return first, again


def selective_with_user_ops() -> _Contexts:
    """Return contexts that keep only results of `KEPT` and mark the second pass."""
    first, again = selective()
    return _Dear(first), _Marked(_Dear(again))


class _Marked(AbstractContextManager[None]):
    """Context in which `is_repeating` is true. Entered repeatedly if a graph is kept."""

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self.context = context

    def __enter__(self) -> None:
        _MARKED.set(True)
        self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        # Recomputation stops early by an exception, which continues from here.
        self.context.__exit__(*error)
        _MARKED.set(False)


class _Dear(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch 2.13: no annotations
    """Mode of torch's selective checkpointing that receives only operations of `KEPT`.

    torch's modes require equal passes (2.13: "not found in storage"). ZeRO-3's gathers differ.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13: no annotations
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_expensive(func):
            return self.mode.__torch_dispatch__(func, types, args, kwargs)
        _copy_changed(self.mode.storage, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Keeping(_CachingTorchDispatchMode):  # type: ignore[no-untyped-call]  # torch 2.13: no annotations
    """torch's mode of the first pass, with copies of results that change in place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _copy_changed(self.storage, func, args, kwargs or {})
        keep: Any = super().__torch_dispatch__
        return keep(func, types, args, kwargs)


def _copy_changed(storage: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep a copy of results that an operation is about to change in place."""
    # Experts add biases to their products in place, and torch 2.13 rejects a changed result.
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable or get_proxy_mode() is not None:
        return  # a compiled graph has no operation in place
    is_alias: Any = vars(torch._C)["_is_alias_of"]  # compares memory, missing from torch's stubs
    given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    changed = [given.get(a.name) for a in schema.arguments if a.is_write]
    changed = [each for each in changed if isinstance(each, torch.Tensor)]
    for kept in tree_leaves([list(entries.values()) for entries in storage.values()]):
        if hasattr(kept, "version") and any(is_alias(kept.val, each) for each in changed):
            kept.val = kept.val.clone()
            kept.version = kept.val._version


def _is_expensive(operation: Any) -> bool:
    return getattr(operation, "overloadpacket", operation).__name__ in KEPT


def _keep_expensive(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    dear = _is_expensive(operation)
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


def apply_checkpointing(plan: Plan, model: torch.nn.Module) -> None:
    """Apply `memory.checkpointing`, before compilation. RunError: No layer supports it."""
    memory, layers = plan.config.memory, find_layers(model)
    arguments = _checkpoint_arguments(plan)
    if arguments is None:
        return
    key = f"memory.checkpointing = {memory.checkpointing.value}"
    if not layers:
        raise RunError(
            f"{key}: {type(model).__name__} has no layers that transformers can checkpoint"
            "\n  -> memory=none"
        )
    if is_plain(model):
        for layer in layers[:: memory.every_n]:
            layer.forward = partial(_checkpointed, layer, layer.forward, arguments)
        return
    # transformers has renamed the method. Early 5.x versions have only the old name.
    renamed = hasattr(model, "activation_checkpointing_enable")
    enable: Any = getattr(model, f"{'activation' if renamed else 'gradient'}_checkpointing_enable")
    enable(arguments)
    off = [type(layer).__name__ for layer in layers if not layer.gradient_checkpointing]
    if off:
        raise RunError(
            f"{key}: {len(off)} of {len(layers)} layers ignore it ({off[0]})\n  -> memory=none"
        )
    for layer in set(layers) - set(layers[:: memory.every_n]):
        layer.gradient_checkpointing = False  # type: ignore[assignment]  # torch 2.13: a Module


def _checkpoint_arguments(plan: Plan) -> dict[str, Any] | None:
    ways = CHECKPOINTING[plan.config.memory.checkpointing]
    if ways is None:
        return None
    # Reentrant checkpointing needs inputs that require gradients, and cannot be compiled.
    arguments: dict[str, Any] = {"use_reentrant": False}
    # ZeRO-3 gathers a layer's weights by operations of the layer's own forward pass.
    if make := ways[plan.ranks.zero_stage == 3]:
        # Without a name of the policy, torch 2.13 does not cache compiled graphs across runs.
        vars(make)["cache_hash"] = f"eke {make.__name__}: {sorted(KEPT)}"
        arguments["context_fn"] = make
    return arguments


def _checkpointed(
    layer: nn.Module, forward: Callable[..., Any], how: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a layer's forward pass, which a backward pass repeats."""
    if not (layer.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, **how, **kwargs)


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers, the units of checkpointing (T5: encoder first).

    In own code: of the classes in `model.layers`, else members of one list of modules of one class
    with inner modules, without layers inside others.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    origin = origin_of(model)
    if origin is not None and origin.layers is not None:
        return [m for m in model.modules() if type(m).__name__ in origin.layers]
    found = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    return found if found or origin is None else [*_members(model)]


def _members(module: nn.Module) -> Iterator[nn.Module]:
    children = [*module.children()]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    if is_list and len({*map(type, children)}) == 1 and all([*m.children()] for m in children):
        yield from dict.fromkeys(children)
        return
    for child in children:
        yield from _members(child)


@contextmanager
def count_layer_calls(model: torch.nn.Module) -> Iterator[list[int]]:
    """Count the forward calls of each layer in order of `find_layers`, in eager code only."""
    layers = find_layers(model)
    calls = [0] * len(layers)

    def count(index: int, *_: Any) -> None:
        calls[index] += 1

    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            inner = (m for m in layer.modules() if m is not layer)
            # transformers checkpoints a layer's `forward` inside its `__call__`, so hooks of the
            # layer miss the second run. Hook its first leaf, a norm or a query projection, called
            # once per forward pass. Fused adapters do not call the leaves below them.
            leaf = next(m for m in inner if "forward" in vars(m) or not [*m.children()])
            hooks.enter_context(leaf.register_forward_pre_hook(partial(count, index)))
        yield calls


CHECKPOINTING: dict[Checkpointing, tuple[_MakeContexts | None, _MakeContexts] | None] = {
    Checkpointing.off: None,
    Checkpointing.full: (None, marked),
    Checkpointing.selective: (selective, selective_with_user_ops),
}
"""`memory.checkpointing` -> contexts of torch's checkpoint, in general and under ZeRO-3."""
