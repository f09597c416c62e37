"""Activations in host memory between forward and backward pass."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from eke.plan.planner import Plan

MIN_BYTES = 1024
"""Smaller tensors stay: the copy would cost more than they take (torchtune's OffloadActivations
has the same limit, https://docs.pytorch.org/torchtune/stable/generated/)."""


class ActivationOffload(saved_tensors_hooks):
    """Context of a forward pass: what it saves for backward goes to host memory until then.

    As torch.autograd.graph.save_on_cpu, but weights stay where they are (a linear layer saves its
    weight for the backward pass, which is no activation), and no copy makes the host wait: copies
    to and from page-locked memory are queued in the stream that computes. A weight that autocast
    has copied into 16 bits is neither moved nor kept: it is copied once more. (Not so where it is
    frozen: autograd does not know then what was copied, and the copy goes to the host.)
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._pack, self._unpack)
        self._weights = {p.untyped_storage()._cdata for p in model.parameters()}
        self.bytes_moved = 0
        """To the host, in all forward passes so far."""

    def _pack(self, tensor: Tensor) -> Any:
        if not is_away(tensor) or tensor.nbytes < MIN_BYTES:
            return tensor
        if tensor.untyped_storage()._cdata in self._weights:
            return tensor
        weight = copied_leaf(tensor)
        if weight is not None and weight.untyped_storage()._cdata in self._weights:
            return CopiedWeight.of(tensor, weight)
        pinned = tensor.device.type == "cuda"
        host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        host.copy_(tensor, non_blocking=True)
        self.bytes_moved += tensor.nbytes
        return tensor.device, host

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, CopiedWeight):
            return packed.again()
        device, host = packed
        moved: Tensor = host.to(device, non_blocking=True)
        return moved


@dataclass(frozen=True)
class CopiedWeight:
    """A weight in another format, or a view of that: what it takes to make it once more."""

    weight: Tensor
    version: int
    """Of the weight when it was copied."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Of the view, in numbers, from the beginning of the copy."""

    @staticmethod
    def of(tensor: Tensor, weight: Tensor) -> "CopiedWeight":
        """A tensor that is a view of a copy of all of `weight`."""
        shape = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return CopiedWeight(weight, weight._version, tensor.dtype, *shape)

    def again(self) -> Tensor:
        """The tensor, of memory of its own.

        Raises:
            RuntimeError: the weight has changed since; autograd says the same of what it keeps.
        """
        if self.weight._version != self.version:
            raise RuntimeError("a weight was changed between the forward and the backward pass")
        copy = self.weight.detach().to(self.dtype)
        return copy.as_strided(self.size, self.stride, self.offset)


REARRANGED = frozenset(
    f"{name}Backward0"
    for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze")
)
"""Operations of autograd whose result lies in the memory of its argument, number for number."""


def copied_leaf(tensor: Tensor) -> Tensor | None:
    """What a tensor is a copy of, in another format and perhaps rearranged; None: of no leaf."""
    node: Any = tensor.grad_fn
    copies = 0
    while node is not None and not hasattr(node, "variable"):
        if node.name() == "ToCopyBackward0":
            copies += 1
        elif node.name() not in REARRANGED:
            return None
        node = node.next_functions[0][0]
    leaf: Tensor | None = getattr(node, "variable", None)
    if leaf is None or copies != 1 or not leaf.is_contiguous():
        return None
    return leaf


def is_away(tensor: Tensor) -> bool:
    """Whether a tensor lies elsewhere than in host memory."""
    return tensor.device.type != "cpu"


def build_activation_offload(plan: Plan, model: nn.Module) -> AbstractContextManager[Any]:
    """Context of each training forward pass; may be entered again and again."""
    return ActivationOffload(model) if plan.config.memory.activation_offload else nullcontext()
