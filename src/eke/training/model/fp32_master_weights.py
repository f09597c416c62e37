"""Float32 copies of bfloat16 weights, for the optimizer to step on.

bfloat16 keeps 8 bits of a number: what an update changes below the ninth is lost each time it is
rounded, and never adds up. Kept in float32 it does. Micikevicius et al. 2017, arXiv:1710.03740,
section 3.1.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from eke.training.distributed.sharding import cut_like, part

Groups = list[dict[str, Any]]

Pairs = list[tuple[nn.Parameter, nn.Parameter]]
"""A weight of the model, and its copy."""

_PAIRS: WeakKeyDictionary[torch.optim.Optimizer, Pairs] = WeakKeyDictionary()

MASTER = "master"
"""Key of the copies in the optimizer's state dict."""

AT_ONCE_BYTES = 64 * 2**20
"""Of float32 gradients that come into being before those they are copied from go: a choice. A GPU
copies all of them by a few kernels; tensor by tensor each would be a launch."""


def build_with_master(
    groups: Groups, build: Callable[[Groups], torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """The optimizer of float32 copies of these weights, which writes back what it has done.

    Before each step the gradients move over to the copies, after it the weights become the rounded
    copies. The optimizer's state dict holds the copies, and loads them. Gradient clipping and the
    gradient norm see the model's gradients as ever.

    Args:
        groups: parameter groups of the model's weights.
        build: parameter groups -> optimizer.
    """
    pairs: Pairs = []
    copied = []
    for group in groups:
        copies = [nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in group["params"]]
        pairs += zip(group["params"], copies, strict=True)
        copied.append({**group, "params": copies})
    optimizer = build(copied)
    _connect(optimizer, pairs)
    _PAIRS[optimizer] = pairs
    return optimizer


def stepped_weights(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The model's weights that an optimizer steps, be it on copies of them."""
    if optimizer in _PAIRS:
        return [weight for weight, _ in _PAIRS[optimizer]]
    return [p for group in optimizer.param_groups for p in group["params"]]


def _connect(optimizer: torch.optim.Optimizer, pairs: Pairs) -> None:
    together = list(_stretches(pairs))

    @torch.no_grad()
    def take_gradients(*_: Any) -> None:
        for stretch in together:
            narrow, wide = [], []
            for weight, copy in stretch:
                copy.grad = None if weight.grad is None else torch.empty_like(copy)
                if weight.grad is not None and copy.grad is not None:
                    narrow.append(weight.grad)
                    wide.append(copy.grad)
                weight.grad = None
            _copy_all(wide, narrow)

    @torch.no_grad()
    def write_back(*_: Any) -> None:
        _copy_all([weight for weight, _ in pairs], [copy for _, copy in pairs])

    def save(_: Any, state: dict[str, Any]) -> None:
        state[MASTER] = [copy.detach() for _, copy in pairs]

    @torch.no_grad()
    def load(_: Any, state: dict[str, Any]) -> None:
        saved: list[Tensor] = state.pop(MASTER)
        for (_, copy), tensor in zip(pairs, saved, strict=True):
            copy.copy_(cut_like(tensor, copy))

    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(write_back)
    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)


def _stretches(pairs: Pairs) -> Iterator[Pairs]:
    """The pairs in order, AT_ONCE_BYTES of copies at a time; a larger one alone."""
    stretch: Pairs = []
    num_bytes = 0
    for weight, copy in pairs:
        size = part(copy).nbytes
        if stretch and num_bytes + size > AT_ONCE_BYTES:
            yield stretch
            stretch, num_bytes = [], 0
        stretch.append((weight, copy))
        num_bytes += size
    if stretch:
        yield stretch


def _copy_all(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors into others, of another format perhaps; cut ones are cut alike."""
    if into:
        torch._foreach_copy_([part(tensor) for tensor in into], [part(value) for value in values])


def master_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what the optimizer steps on without its being a weight of the model."""
    weights = {id(p) for p in model.parameters()}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    return sum(p.numel() * p.element_size() for p in stepped if id(p) not in weights)
