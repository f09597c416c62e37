"""Activation checkpointing, and the sign that it happened.

Full: keep each layer's input, run its forward pass again in backward (Chen et al. 2016,
arXiv:1604.06174). Selective: keep what is dear to compute, too (Korthikanti et al. 2022,
arXiv:2205.05198, section 5).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachingTorchDispatchMode,
    create_selective_checkpoint_contexts,
)

from eke.common.errors import RunError
from eke.config.schema import Checkpointing
from eke.plan.planner import Plan

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Of the first forward pass and of the second."""

MakeContexts = Callable[[], Contexts]

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
"""Operations whose results selective checkpointing keeps: linear layers and fused attention, where
the time goes. Not `bmm`: the score matrix of unfused attention grows with the square of the
length, and is what checkpointing is there to save."""


_MARKED: ContextVar[bool] = ContextVar("marked", default=False)


def is_repeating() -> bool:
    """Whether what runs now is a forward pass that is repeated inside a backward pass.

    There autograd runs its own operations with gradients switched off; a repeated forward pass has
    them on. Not so within an autograd function, into which ZeRO-3 puts every linear layer: there
    the pass is `marked`.
    """
    # The id of the backward pass that runs, -1 outside; torch's own checkpointing asks it, too.
    if torch._C._current_graph_task_id() == -1:
        return False
    return torch.is_grad_enabled() or _MARKED.get()


def marked() -> Contexts:
    """Keep nothing; the second pass is marked."""
    return nullcontext(), _Marked(nullcontext())


def selective() -> Contexts:
    """Keep what `KEPT` names; every operation must happen in both passes."""
    make: Callable[..., Contexts] = create_selective_checkpoint_contexts
    first, again = make(_keep_dear)
    first.__class__ = _Keeping
    return first, again


def selective_among_others() -> Contexts:
    """Keep what `KEPT` names; other operations may differ; the second pass is marked."""
    first, again = selective()
    return _Dear(first), _Marked(_Dear(again))


class _Marked(AbstractContextManager[None]):
    """A context in which `is_repeating`; entered again where a graph is kept for a second pass."""

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self.context = context

    def __enter__(self) -> None:
        _MARKED.set(True)
        self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        # Recomputation stops early by an exception, which goes on from here.
        self.context.__exit__(*error)
        _MARKED.set(False)


class _Dear(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch 2.13: no annotations
    """One of torch's two modes of selective checkpointing, shown the operations in `KEPT` alone.

    torch's want the same operations both times (2.13: "not found in storage"). ZeRO-3 gathers a
    layer's weights inside it, and which ones it has already fetched differs.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13: no annotations
        self.mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _is_dear(func):
            return self.mode.__torch_dispatch__(func, types, args, kwargs)
        _copy_changed(self.mode.storage, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Keeping(_CachingTorchDispatchMode):  # type: ignore[no-untyped-call]  # torch 2.13: no annotations
    """torch's mode of the first pass, which keeps what nothing changes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        _copy_changed(self.storage, func, args, kwargs or {})
        keep: Any = super().__torch_dispatch__
        return keep(func, types, args, kwargs)


def _copy_changed(storage: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep a copy of what an operation is about to change in place.

    Experts add biases to their products so; torch 2.13 refuses to read such a result again.
    """
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable or get_proxy_mode() is not None:
        return  # a compiled graph has no operation in place
    is_alias: Any = vars(torch._C)["_is_alias_of"]  # of the memory; in no stub of torch 2.13
    given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    changed = [given.get(a.name) for a in schema.arguments if a.is_write]
    changed = [each for each in changed if isinstance(each, torch.Tensor)]
    for kept in tree_leaves([list(entries.values()) for entries in storage.values()]):
        if hasattr(kept, "version") and any(is_alias(kept.val, each) for each in changed):
            kept.val = kept.val.clone()
            kept.version = kept.val._version


def _is_dear(operation: Any) -> bool:
    return getattr(operation, "overloadpacket", operation).__name__ in KEPT


def _keep_dear(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    dear = _is_dear(operation)
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


def apply_checkpointing(plan: Plan, model: torch.nn.Module) -> None:
    """Apply `memory.checkpointing`, before compilation; RunError if no layer supports it."""
    memory, layers = plan.config.memory, find_layers(model)
    arguments = checkpoint_arguments(plan)
    if arguments is None:
        return
    key = f"memory.checkpointing = {memory.checkpointing.value}"
    if not layers:
        raise RunError(
            f"{key}: {type(model).__name__} has no layer that transformers can checkpoint"
            "\n  -> memory=none"
        )
    # transformers renamed it and warns about the old name; earlier 5.x have only that one.
    renamed = hasattr(model, "activation_checkpointing_enable")
    enable: Any = getattr(model, f"{'activation' if renamed else 'gradient'}_checkpointing_enable")
    enable(arguments)
    off = [type(layer).__name__ for layer in layers if not layer.gradient_checkpointing]
    if off:
        raise RunError(
            f"{key}: {len(off)} of {len(layers)} layers stayed off ({off[0]})\n  -> memory=none"
        )
    for layer in set(layers) - set(layers[:: memory.every_n]):
        layer.gradient_checkpointing = False  # type: ignore[assignment]  # torch 2.13: a Module


def checkpoint_arguments(plan: Plan) -> dict[str, Any] | None:
    """Arguments of torch's checkpoint; None without checkpointing."""
    ways = CHECKPOINTING[plan.config.memory.checkpointing]
    if ways is None:
        return None
    # Reentrant checkpointing needs inputs that require gradients, and cannot be compiled.
    arguments: dict[str, Any] = {"use_reentrant": False}
    # ZeRO-3 gathers a layer's weights by operations of the layer's own forward pass.
    if make := ways[plan.config.distributed.option == "zero3"]:
        # What it does; without a name for it torch 2.13 keeps no compiled graph for later runs.
        vars(make)["cache_hash"] = f"eke {make.__name__}: {sorted(KEPT)}"
        arguments["context_fn"] = make
    return arguments


def find_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The Transformer layers: what transformers recomputes as a unit; T5's encoder comes first."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


@contextmanager
def count_layer_calls(model: torch.nn.Module) -> Iterator[list[int]]:
    """Count the forward calls of every Transformer layer, in the order of `find_layers`.

    Only in eager code: torch.compile ignores hooks that come after it. transformers checkpoints a
    layer's `forward` inside its `__call__`, where hooks of the layer do not see the second run, so
    its first leaf is hooked: in every family a norm or a query projection, called once per forward
    pass. Fused adapters do not call the leaves below them.
    """
    layers = find_layers(model)
    calls = [0] * len(layers)

    def count(index: int, *_: Any) -> None:
        calls[index] += 1

    handles = []
    for index, layer in enumerate(layers):
        inner = (m for m in layer.modules() if m is not layer)
        leaf = next(m for m in inner if "forward" in vars(m) or not any(True for _ in m.children()))
        handles.append(leaf.register_forward_pre_hook(partial(count, index)))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


CHECKPOINTING: dict[Checkpointing, tuple[MakeContexts | None, MakeContexts] | None] = {
    Checkpointing.off: None,
    Checkpointing.full: (None, marked),
    Checkpointing.selective: (selective, selective_among_others),
}
"""`memory.checkpointing` -> what torch's checkpoint keeps, and under ZeRO-3."""
