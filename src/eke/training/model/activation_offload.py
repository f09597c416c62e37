"""Offloading of activations: what the backward pass needs waits in host memory."""

import weakref
from collections import defaultdict, deque
from collections.abc import Callable
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
"""Tensors that may be on their way to the host, and that are fetched ahead of their use. More hide
more of the transfers, and take more memory of the device (torchtune's has 5 on their way)."""

SLAB_BYTES = 2**28
"""Page-locked memory is allocated in pieces of this size: torch rounds each up to a power of 2."""


class HostPool:
    """Blocks of host memory, page-locked for a GPU, that are used again in every step."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._slab = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int, pinned: bool) -> Tensor:
        """A block, uint8 of shape (bytes,): at most an eighth longer than asked for."""
        step = 1 << max(0, num_bytes.bit_length() - 4)
        size = -(-num_bytes // step) * step
        if self._free[size]:
            return self._free[size].pop()
        if self._slab.numel() < size:
            length = max(SLAB_BYTES, 1 << (size - 1).bit_length())
            self._slab = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        block, self._slab = self._slab[:size], self._slab[size:]
        return block

    def give_back(self, block: Tensor) -> None:
        """A block that nobody reads any more, but for what is queued in the stream of copies."""
        self._free[block.numel()].append(block)


class CopyStream:
    """Copies in a stream of their own, one after the other; without CUDA at once."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Copy once all is done that has been queued up to now; what to `wait` for."""
        if self.stream is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self.stream = torch.cuda.Stream()
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """What is queued from now on comes after this copy."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def protect(self, tensor: Tensor) -> None:
        """Its memory is not used again before the copies that are queued now are done."""
        if self.stream is not None:
            tensor.record_stream(self.stream)


@dataclass(eq=False)
class Away:
    """A tensor in host memory, or on its way there or back."""

    owner: "ActivationOffload"
    number: int
    """In the order of the forward pass."""
    block: Tensor
    host: Tensor
    """The same memory as `block`, with the tensor's own format and shape."""
    source: Tensor | None
    """As it was saved, while it is on its way to the host."""
    version: int
    """Of the source: it must not be changed before it is there."""
    event: torch.cuda.Event | None
    """The end of its last copy."""
    device: torch.device
    uses: int = 1
    """Operations of the backward pass that have not asked for it yet."""
    fetched: Tensor | None = None

    def __del__(self) -> None:
        """Nobody asks for it any more, though copies may still be queued."""
        if self.fetched is not None:
            self.owner.copies.protect(self.fetched)
        self.owner.pool.give_back(self.block)

    def original(self) -> Tensor | None:
        """The source, where it is still there.

        Raises:
            RuntimeError: it was changed, as autograd says of what it keeps.
        """
        if self.source is not None and self.source._version != self.version:
            raise RuntimeError("a tensor needed for the backward pass was changed in place")
        return self.source

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it is away already: several operations save the same tensor."""
        mine = self.source
        return mine is not None and _place(mine) == _place(tensor)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    storage, offset = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return storage, offset, tensor.size(), tensor.stride(), tensor.dtype, tensor._version


class ActivationOffload(saved_tensors_hooks):
    """Context of a forward pass: what it saves for backward goes to host memory until then.

    As torch.autograd.graph.save_on_cpu, but weights stay where they are (a linear layer saves its
    weight for the backward pass, which is no activation), copies to and from page-locked memory
    run beside the passes in a stream of their own, and what several operations save in a row is
    moved once. A weight that autocast has copied into 16 bits is neither moved nor kept: it is
    copied once more. (Not so where it is frozen: autograd does not know then what was copied, and
    the copy goes to the host.)

    All memory of the device belongs to the stream that computes: what leaves is held until its
    copy is waited for, so that the allocator needs no events to know when it is free.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._pack, self._unpack)
        self._weights = {p.untyped_storage()._cdata for p in model.parameters()}
        self.pool, self.copies = HostPool(), CopyStream()
        self._leaving: deque[Away] = deque()
        self._moved: list[weakref.ref[Away]] = []
        self.bytes_moved = 0
        """To the host, in all forward passes so far."""

    def __enter__(self) -> None:
        """A forward pass begins; of the one before nothing is on its way any more."""
        while self._leaving:
            self._let_go(self._leaving.popleft())
        self._moved = []
        super().__enter__()

    def _pack(self, tensor: Tensor) -> Any:
        if not is_away(tensor) or tensor.nbytes < MIN_BYTES:
            return tensor
        if tensor.untyped_storage()._cdata in self._weights:
            return tensor
        weight = copied_leaf(tensor)
        if weight is not None and weight.untyped_storage()._cdata in self._weights:
            return made_again(tensor, weight)
        tensor = tensor.detach()
        same = next((each for each in self._leaving if each.is_of(tensor)), None)
        if same is not None:
            same.uses += 1
            return same
        return self._send(tensor)

    def _send(self, tensor: Tensor) -> Away:
        while len(self._leaving) >= IN_FLIGHT:
            oldest = self._leaving.popleft()
            oldest.original()
            self.copies.wait(oldest.event)
            oldest.source = None
        block = self.pool.take(tensor.nbytes, pinned=tensor.device.type == "cuda")
        like = torch.empty_like(tensor, device="meta")
        host = block[: tensor.nbytes].view(tensor.dtype).as_strided(like.size(), like.stride())
        event = self.copies.copy(host, tensor)
        self.bytes_moved += tensor.nbytes
        number = len(self._moved)
        away = Away(self, number, block, host, tensor, tensor._version, event, tensor.device)
        self._moved.append(weakref.ref(away))
        self._leaving.append(away)
        return away

    def _let_go(self, away: Away) -> None:
        """The device's memory is free once its copy to the host is done; nothing waits for it."""
        if away.source is not None:
            self.copies.protect(away.source)
            away.source = None

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, Away):
            return packed if isinstance(packed, Tensor) else packed()
        packed.uses -= 1
        found = packed.original()
        if found is None:
            found = self._fetch(packed)
            self.copies.wait(packed.event)
        if packed.uses <= 0:
            self._let_go(packed)
            packed.fetched = None
        for each in self._moved[max(0, packed.number - IN_FLIGHT) : packed.number][::-1]:
            before = each()
            if before is not None and before.uses > 0 and before.source is None:
                self._fetch(before)
        return found

    def _fetch(self, away: Away) -> Tensor:
        """Begin to bring it back, unless that has begun."""
        if away.fetched is None:
            away.fetched = torch.empty_like(away.host, device=away.device)
            away.event = self.copies.copy(away.fetched, away.host)
        return away.fetched


def made_again(tensor: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """A function that makes a view of a copy of all of `weight` once more, in new memory.

    It raises a RuntimeError where the weight has changed since, as autograd does of what it keeps.
    """
    version, dtype = weight._version, tensor.dtype
    size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def again() -> Tensor:
        if weight._version != version:
            raise RuntimeError("a weight was changed between the forward and the backward pass")
        return weight.detach().to(dtype).as_strided(size, stride, offset)

    return again


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
