"""Offloading of activations: what the backward pass needs waits in host memory."""

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
"""Smaller tensors stay: the copy would cost more than they take (torchtune's OffloadActivations
has the same limit, https://docs.pytorch.org/torchtune/stable/generated/)."""

IN_FLIGHT = 4
"""Tensors on their way to the host, and fetched ahead of their use; both take device memory."""


@dataclass(eq=False)
class Away:
    """A tensor in host memory, or on its way there (`source`) or back (`fetched`)."""

    owner: "ActivationOffload"
    host: Tensor
    source: Tensor | None
    place: tuple[Any, ...]
    device: torch.device
    before: "Callable[[], Away | None]"
    """What left before it, while that is needed."""
    event: Any
    """The end of its last copy."""
    uses: int = 1
    """Operations of the backward pass that have not used it yet."""
    fetched: Any = None

    def __del__(self) -> None:
        if self.fetched is not None:  # a copy that nothing reads any more may be queued
            self.owner.protect(self.fetched)

    def original(self) -> Tensor | None:
        """The source, while it is there; a RuntimeError if it was changed, as autograd's."""
        if self.source is not None and _place_of(self.source) != self.place:
            raise RuntimeError("a tensor needed for the backward pass was changed in place")
        return self.source


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    """The same for the same numbers in the same memory."""
    storage, offset = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return storage, offset, tensor.size(), tensor.stride(), tensor.dtype, tensor._version


class ActivationOffload(saved_tensors_hooks):
    """Context of a forward pass: what it saves for backward goes to host memory until then.

    As torch.autograd.graph.save_on_cpu, but weights stay, copies run in their own stream alongside
    the passes, and what several operations save in a row is moved once. A trained weight that
    autocast has copied into 16 bits is copied once more instead. All memory of the device is
    allocated by the stream that computes, which waits for a copy before letting its source go.
    """

    def __init__(self, model: nn.Module, copies: Sequence[Tensor] = ()) -> None:
        super().__init__(self._pack, self._unpack)
        self._weights = {p.untyped_storage()._cdata for p in (*model.parameters(), *copies)}
        cuda: Any = torch.cuda  # torch 2.13 annotates neither of the two
        self.stream: torch.cuda.Stream | None = cuda.Stream() if cuda.is_initialized() else None
        """Of the copies; without CUDA they are made at once."""
        self._leaving: deque[Away] = deque()
        self._last: Callable[[], Away | None] = lambda: None
        self.bytes_moved = 0
        """To the host, in all forward passes so far."""

    def _pack(self, tensor: Tensor) -> Any:
        is_weight = tensor.untyped_storage()._cdata in self._weights
        if is_weight or not is_away(tensor) or tensor.nbytes < MIN_BYTES:
            return tensor
        weight = copied_leaf(tensor)
        if weight is not None and weight.untyped_storage()._cdata in self._weights:
            return made_again(tensor, weight)
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
        pinned = tensor.device.type == "cuda"  # torch keeps page-locked memory for the next step
        host, source = torch.empty_like(tensor, device="cpu", pin_memory=pinned), tensor.detach()
        self.bytes_moved += tensor.nbytes
        event = self.copy(host, source)
        away = Away(self, host, source, place, tensor.device, self._last, event)
        self._last = weakref.ref(away)
        self._leaving.append(away)
        return away

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, Away):
            return packed if isinstance(packed, Tensor) else packed()
        packed.uses -= 1
        found = packed.original()
        each: Away | None = packed
        for _ in range(1 + IN_FLIGHT):  # this one, and those that the pass will ask for next
            if each and each.source is each.fetched is None and (each is packed or each.uses > 0):
                each.fetched = torch.empty_like(each.host, device=each.device)
                each.event = self.copy(each.fetched, each.host)
            each = each and each.before()
        if found is None:
            found = packed.fetched
            self.wait(packed.event)
        else:  # the end of the forward pass: its copy need not be waited for
            self.protect(found)
        if packed.uses <= 0:
            packed.source = packed.fetched = None
        return found

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Copy once all is done that has been queued up to now; what to `wait` for."""
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def wait(self, event: Any) -> None:
        """What is queued from now on comes after this copy."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def protect(self, tensor: Tensor) -> None:
        """Its memory is not used again before the copies that are queued now are done."""
        if self.stream is not None:
            tensor.record_stream(self.stream)


def made_again(tensor: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """Makes a view of a copy of all of `weight` once more; RuntimeError if that has changed."""
    version, dtype = weight._version, tensor.dtype
    view = tensor.size(), tensor.stride(), tensor.storage_offset()

    def again() -> Tensor:
        if weight._version != version:
            raise RuntimeError("a weight was changed between the forward and the backward pass")
        return weight.detach().to(dtype).as_strided(*view)

    return again


_NAMES = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze")
REARRANGED = frozenset(f"{name}Backward0" for name in _NAMES)
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
    return leaf if leaf is not None and copies == 1 and leaf.is_contiguous() else None


def is_away(tensor: Tensor) -> bool:
    """Whether a tensor lies elsewhere than in host memory."""
    return tensor.device.type != "cpu"


def build_activation_offload(
    plan: Plan, model: nn.Module, copies: Sequence[Tensor] = ()
) -> AbstractContextManager[Any]:
    """Context of each training forward pass; may be entered again and again."""
    offloads = plan.config.memory.activation_offload
    return ActivationOffload(model, copies) if offloads else nullcontext()
