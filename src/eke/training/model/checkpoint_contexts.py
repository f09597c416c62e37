"""What surrounds a checkpointed layer's first forward pass, and its second one in backward.

Selective: Korthikanti et al. 2022, arXiv:2205.05198, section 5: keep what is dear to compute.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Of the first forward pass and of the second."""

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
    them on, since it must save tensors as the first one did. Not so within an autograd function:
    ZeRO-3 puts every linear layer into one, so there the pass is `marked`.
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
    return make(_keep_dear)


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
    layer's weights inside it, and which ones it has already fetched differs: what has to be the
    same are the results that are kept.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13: no annotations
        self.mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _is_dear(func):
            return self.mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _is_dear(operation: Any) -> bool:
    return getattr(operation, "overloadpacket", operation).__name__ in KEPT


def _keep_dear(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    dear = _is_dear(operation)
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE
