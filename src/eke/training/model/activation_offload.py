"""Offloading of activations to host memory between the forward and the backward pass."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from eke.plan.planner import Plan

MIN_BYTES = 1024
"""Smallest tensor that is moved, as in torchtune's OffloadActivations. Copying less costs more."""

IN_FLIGHT = 4
"""Tensors being copied to the host, and tensors fetched ahead. Both take device memory."""


@dataclass(eq=False)
class _OffloadedTensor:
    """Tensor in host memory, with `source` on its way there, with `fetched` on its way back."""

    owner: "ActivationOffload"
    host: Tensor
    source: Tensor | None
    place: tuple[Any, ...]
    device: torch.device
    before: "Callable[[], _OffloadedTensor | None]"
    """Return the tensor moved before this one, while it is needed."""
    event: Any
    """End of the last copy."""
    uses: int = 1
    """Operations of the backward pass that still need the tensor."""
    fetched: Any = None

    def __del__(self) -> None:
        if self.fetched is not None:  # a copy that is not needed any more may be queued
            self.owner.protect(self.fetched)

    def original(self) -> Tensor | None:
        """Return the source if it still exists. RuntimeError: It was changed in place."""
        if self.source is not None and _place_of(self.source) != self.place:
            raise RuntimeError("a tensor needed for the backward pass was changed in place")
        return self.source


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for equal values in the same memory."""
    storage, offset = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return storage, offset, tensor.size(), tensor.stride(), tensor.dtype, tensor._version


class ActivationOffload(saved_tensors_hooks):
    """Context of a forward pass that keeps saved tensors in host memory until backward.

    Unlike torch.autograd.graph.save_on_cpu, it leaves weights on the device, copies in a separate
    stream, and moves a tensor once for consecutive operations. A trained weight that autocast has
    cast is cast again instead. The computing stream waits for a copy before it releases the source.
    """

    def __init__(self, model: nn.Module, copies: Sequence[Tensor] = ()) -> None:
        super().__init__(self._pack, self._unpack)
        self._weights = {p.untyped_storage()._cdata for p in (*model.parameters(), *copies)}
        cuda: Any = torch.cuda  # torch 2.13 does not annotate these functions
        self.stream: torch.cuda.Stream | None = cuda.Stream() if cuda.is_initialized() else None
        """Stream of the copies. Without CUDA, copies are synchronous."""
        self._leaving: deque[_OffloadedTensor] = deque()
        self._last: Callable[[], _OffloadedTensor | None] = lambda: None
        self.bytes_moved = 0
        """Bytes moved to the host in all forward passes so far."""

    def _pack(self, tensor: Tensor) -> Any:
        is_weight = tensor.untyped_storage()._cdata in self._weights
        if is_weight or not is_on_device(tensor) or tensor.nbytes < MIN_BYTES:
            return tensor
        weight = copied_leaf(tensor)
        if weight is not None and weight.untyped_storage()._cdata in self._weights:
            return rebuild_view(tensor, weight)
        place = _place_of(tensor)
        for each in self._leaving:
            if each.source is not None and each.place == place:
                each.uses += 1
                return each
        while len(self._leaving) >= IN_FLIGHT:
            oldest = self._leaving.popleft()
            if oldest.original() is not None:
                self.wait(oldest.event)
                oldest.source = None
        pinned = tensor.device.type == "cuda"  # torch reuses page-locked memory in the next step
        host, source = torch.empty_like(tensor, device="cpu", pin_memory=pinned), tensor.detach()
        self.bytes_moved += tensor.nbytes
        event = self.copy(host, source)
        away = _OffloadedTensor(self, host, source, place, tensor.device, self._last, event)
        self._last = weakref.ref(away)
        self._leaving.append(away)
        return away

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _OffloadedTensor):
            return packed if isinstance(packed, Tensor) else packed()
        packed.uses -= 1
        found = packed.original()
        each: _OffloadedTensor | None = packed
        for _ in range(1 + IN_FLIGHT):  # this tensor, and those the pass needs next
            if each and each.source is each.fetched is None and (each is packed or each.uses > 0):
                each.fetched = torch.empty_like(each.host, device=each.device)
                each.event = self.copy(each.fetched, each.host)
            each = each and each.before()
        if found is None:
            found = packed.fetched
            self.wait(packed.event)
        else:  # the end of the forward pass, without a wait for its copy
            self.protect(found)
        if packed.uses <= 0:
            packed.source = packed.fetched = None
        return found

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Copy after all work queued so far, and return the event to `wait` for."""
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def wait(self, event: Any) -> None:
        """Make work queued from now on wait for this copy."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def protect(self, tensor: Tensor) -> None:
        """Keep the tensor's memory until the copies queued so far have finished."""
        if self.stream is not None:
            tensor.record_stream(self.stream)


def rebuild_view(tensor: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """Return a function that repeats a view of a copy of all of `weight`, if it has not changed."""
    version, dtype = weight._version, tensor.dtype
    view = tensor.size(), tensor.stride(), tensor.storage_offset()

    def again() -> Tensor:
        if weight._version != version:
            raise RuntimeError("a weight was changed between the forward and the backward pass")
        return weight.detach().to(dtype).as_strided(*view)

    return again


_NAMES = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze")
_REARRANGED = frozenset(f"{name}Backward0" for name in _NAMES)
"""Autograd operations whose result shares its argument's memory, element for element."""


def copied_leaf(tensor: Tensor) -> Tensor | None:
    """Return the leaf that a tensor copies in another format or layout, None without a leaf."""
    node: Any = tensor.grad_fn
    copies = 0
    while node is not None and not hasattr(node, "variable"):
        if node.name() == "ToCopyBackward0":
            copies += 1
        elif node.name() not in _REARRANGED:
            return None
        node = node.next_functions[0][0]
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf if leaf is not None and copies == 1 and leaf.is_contiguous() else None


def is_on_device(tensor: Tensor) -> bool:
    """Return whether a tensor is outside host memory."""
    return tensor.device.type != "cpu"


def build_activation_offload(
    plan: Plan, model: nn.Module, copies: Sequence[Tensor] = ()
) -> AbstractContextManager[Any]:
    """Build the context of training forward passes, which can be entered repeatedly."""
    offloads = plan.config.memory.activation_offload
    return ActivationOffload(model, copies) if offloads else nullcontext()
