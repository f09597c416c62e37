"""Projection onto the vocabulary and cross-entropy as one operation, one chunk of rows at a time.

A chunk's logits become their gradient in place, from which the forward pass computes the gradients
of hidden states and projection. Liger-Kernel does the same (arXiv:2410.10989, section 3.2).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eke.common.text import IGNORED
from eke.models.families import FLOAT32_BYTES
from eke.models.sizes import BLOCK_BYTES, chunk_rows

_FLOAT16_SCALE = 1024.0
"""Factor of float16 gradients. float16's smallest normal number is 6e-5: unscaled, a probability
below 1e-5 would lose digits and below 6e-8 be zero. The largest number is 65504."""

UNCHANGED = (1.0, 0.0)
"""Scale and cap of unchanged logits."""

_Fused = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def with_parts(loss: Tensor, losses: Tensor, sources: Tensor | None) -> Tensor:
    """Return the loss, or with sources `[1 + sources]`: the loss and detached sums per source.

    `loss` is the sum of `losses` `[...]`. `sources` `[..., sources]` assigns losses to sources.
    """
    if sources is None:
        return loss
    each = torch.where(sources, losses.detach()[..., None], 0.0)
    return torch.cat([loss[None], each.flatten(0, -2).sum(0)])


def fused_loss_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float = 0.0,
    compiled: bool = False,
    sources: Tensor | None = None,
    change: Sequence[float] = UNCHANGED,
) -> Tensor:
    """Return the value of `loss_sum` without computing all logits. Differentiable once.

    Products use autocast's format. Probabilities, loss and the projection's gradient are float32.
    Shapes: `hidden` `[..., width]`, `weight` `[vocabulary, width]`, `bias` `[vocabulary]`, `labels`
    `[...]`. The share `smoothing` of each target is spread over the vocabulary. `compiled`:
    inductor compiles the operations on logits. `sources`, `change`: see `with_parts`,
    `change_logits`.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    inputs = (hidden.reshape(-1, hidden.shape[-1]), weight, bias)
    trains = torch.is_grad_enabled()
    needed = [trains and tensor is not None and tensor.requires_grad for tensor in inputs]
    how = smoothing, compiled, change, dtype, needed
    loss, losses, *_ = linear_cross_entropy(*inputs, labels.reshape(-1), *how)
    return with_parts(loss, losses, sources)


def change_logits(logits: Tensor, change: Sequence[float]) -> Tensor:
    """Return float32 logits times a scale, capped with tanh if the cap is not 0."""
    scale, cap = change
    wide = logits.float() if scale == 1 else logits.float() * scale
    return cap * torch.tanh(wide / cap) if cap else wide


def _undo_change_in_gradient(gradient: Tensor, changed: Tensor, change: Sequence[float]) -> None:
    """Turn the gradient of changed logits into the gradient of the logits, in place."""
    scale, cap = change
    if cap:
        gradient.mul_(1 - (changed / cap).square_())
    if scale != 1:
        gradient.mul_(scale)


@torch.library.custom_op("eke::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float,
    compiled: bool,
    change: Sequence[float],
    dtype: torch.dtype,
    needed: list[bool],
) -> _Fused:
    """Return summed loss, loss per row, and gradients of hidden states, weight and bias.

    Losses are float32. Gradients are empty if not `needed`, times FLOAT16_SCALE in float16.
    `dtype` is the format of products. A custom operator, which compilers do not change.
    """
    results = _outputs(hidden, weight, needed)
    loss, losses, of_hidden, of_weight, of_bias = (result.zero_() for result in results)
    matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
    derive = _to_gradient_compiled if compiled else _to_gradient
    size = chunk_rows(len(hidden), len(weight), dtype.itemsize)
    for first in range(0, len(hidden), size):
        chunk = slice(first, first + size)
        ignored = (labels[chunk] == IGNORED)[:, None]
        # Zero the rows without label in each product with the gradient of the logits.
        vectors = hidden[chunk].to(dtype).masked_fill(ignored, 0)
        logits = F.linear(vectors, matrix, offset)
        losses[chunk] = derive(logits, labels[chunk], smoothing, change)
        loss += losses[chunk].sum()
        if needed[0]:
            of_hidden[chunk] = (logits @ matrix).masked_fill_(ignored, 0)
        if needed[1]:
            _add_product(of_weight, logits.t(), vectors)
        if needed[2]:
            of_bias += logits.masked_fill_(ignored, 0).sum(0, dtype=torch.float32)
        del logits  # before the logits of the next chunk are allocated
    return results


def _outputs(hidden: Tensor, weight: Tensor, needed: list[bool]) -> _Fused:
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(len(hidden), dtype=torch.float32),
        torch.empty_like(hidden) if needed[0] else hidden.new_empty(0),
        weight.new_empty(weight.shape if needed[1] else 0, dtype=torch.float32),
        weight.new_empty(len(weight) if needed[2] else 0, dtype=torch.float32),
    )


linear_cross_entropy.register_fake(
    lambda hidden, weight, *others: _outputs(hidden, weight, others[-1])
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: _Fused) -> None:
    """Keep the gradients outside saved tensors, which `memory=activation_offload` would move."""
    ctx.gradients = output[2:]
    ctx.dtype, ctx.needed = inputs[-2:]
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, of_loss: Tensor, *_: Any) -> tuple[Any, ...]:
    """Return the gradients times the loss gradient, in place: the projection's is very large."""
    if ctx.gradients is None:
        raise RuntimeError("the fused loss has no second backward pass")
    gradients, ctx.gradients = ctx.gradients, None
    factor = of_loss / _FLOAT16_SCALE if ctx.dtype is torch.float16 else of_loss
    pairs = zip(gradients, ctx.needed, strict=True)
    return (*(gradient.mul_(factor) if need else None for gradient, need in pairs), *[None] * 6)


linear_cross_entropy.register_autograd(_backward, setup_context=_keep)


def _to_gradient(
    logits: Tensor, labels: Tensor, smoothing: float, change: Sequence[float]
) -> Tensor:
    """Turn logits `[rows, vocabulary]` into their gradient, in place, and return losses per row."""
    rows = max(1, BLOCK_BYTES // (FLOAT32_BYTES * logits.shape[-1]))
    found = []
    spread = smoothing / logits.shape[-1]
    pairs = zip(torch.split(logits, rows), torch.split(labels, rows), strict=True)
    for block, own in pairs:
        changed = block if tuple(change) == UNCHANGED else change_logits(block, change)
        logs = F.log_softmax(changed, -1, dtype=torch.float32)
        targets = own.clamp(min=0)[:, None]
        losses = (smoothing - 1) * logs.gather(1, targets)[:, 0]
        if smoothing:
            losses -= spread * logs.sum(-1)
        found.append(losses.masked_fill_(own == IGNORED, 0))
        gradient = logs.exp_().sub_(spread) if smoothing else logs.exp_()
        gradient.scatter_(1, targets, smoothing - 1, reduce="add")
        _undo_change_in_gradient(gradient, changed, change)
        block.copy_(gradient.mul_(_FLOAT16_SCALE) if block.dtype is torch.float16 else gradient)
    return torch.cat(found)


def _to_gradient_compiled(
    logits: Tensor, labels: Tensor, smoothing: float, change: Sequence[float]
) -> Tensor:
    """Do the same in one pass that reads logits twice and writes them once."""
    if smoothing:  # only used with HF Trainer
        return _to_gradient(logits, labels, smoothing, change)
    targets = labels.clamp(min=0)
    # Not compiled: torch 2.11 would read it from the gradient that overwrites the logits.
    chosen = change_logits(logits.gather(1, targets[:, None])[:, 0], change)
    losses = _compiled(tuple(change))(logits, targets) - chosen
    return losses.masked_fill_(labels == IGNORED, 0)


@functools.cache
def _compiled(change: tuple[float, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(functools.partial(_overwrite, change=change))


def _overwrite(logits: Tensor, targets: Tensor, change: Sequence[float]) -> Tensor:
    """Turn logits into their gradient and return each row's log sum of exponentials `[rows]`."""
    wide = change_logits(logits, change)
    normaliser = torch.logsumexp(wide, -1)
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    gradient = (wide - normaliser[:, None]).exp() - is_target.float()
    _undo_change_in_gradient(gradient, wide, change)
    logits.copy_(gradient * _FLOAT16_SCALE if logits.dtype is torch.float16 else gradient)
    return normaliser


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to a float32 total, without rounding to 16 bits if PyTorch supports it."""
    if left.dtype is torch.float32:
        total.addmm_(left, right)
    elif left.device.type != "cpu":  # also the GPU of a memory trace
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    elif left.dtype is torch.float16:  # a sum over rows may exceed 65504
        total.addmm_(left.float(), right.float())
    else:
        total += left @ right
