"""Liger's rotation of queries and keys, as a CPU can run it: it writes over its input.

liger-kernel 0.8.5, ops/rope.py: heads are transposed back to the order they have in memory, where
`contiguous` copies nothing, and the kernel stores its result there, unseen by autograd.
"""

from typing import Any

import torch
from torch import Tensor


def rotate_in_place(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """In place of transformers' `apply_rotary_pos_emb`."""
    rotated: tuple[Tensor, Tensor] = _Rotation.apply(query, key, cos, sin)
    return rotated


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        context.save_for_backward(cos, sin)
        return _write(query, cos, sin), _write(key, cos, sin)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        cos, sin = context.saved_tensors
        query, key = (_write(gradient, cos, -sin) for gradient in gradients)
        return query, key, None, None


def _write(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    there = heads.detach().transpose(1, 2).contiguous()
    left, right = there.chunk(2, dim=-1)
    turned = there * cos.unsqueeze(2) + torch.cat((-right, left), -1) * sin.unsqueeze(2)
    there.numpy()[...] = turned.numpy()
    return there.transpose(1, 2)
