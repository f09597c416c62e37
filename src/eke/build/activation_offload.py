"""Activations in host memory between forward and backward pass."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from eke.plan import Plan

MIN_BYTES = 1024
"""Smaller tensors stay: the copy would cost more than they take (torchtune's OffloadActivations
has the same limit, https://docs.pytorch.org/torchtune/stable/generated/)."""


class ActivationOffload(saved_tensors_hooks):
    """Context of a forward pass: what it saves for backward goes to host memory until then.

    As torch.autograd.graph.save_on_cpu, but weights stay where they are (a linear layer saves its
    weight for the backward pass, which is no activation), and no copy makes the host wait: copies
    to and from page-locked memory are queued in the stream that computes.
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
        pinned = tensor.device.type == "cuda"
        host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        host.copy_(tensor, non_blocking=True)
        self.bytes_moved += tensor.nbytes
        return tensor.device, host

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        moved: Tensor = host.to(device, non_blocking=True)
        return moved


def is_away(tensor: Tensor) -> bool:
    """Whether a tensor lies elsewhere than in host memory."""
    return tensor.device.type != "cpu"


def build_activation_offload(plan: Plan, model: nn.Module) -> AbstractContextManager[Any]:
    """Context of each training forward pass; may be entered again and again."""
    return ActivationOffload(model) if plan.config.memory.activation_offload else nullcontext()
