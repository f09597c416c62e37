"""Trace of storages allocated and freed by a training step on fake tensors."""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims.rng_prims import run_and_save_rng_state
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from eke.estimate.memory.components import Traced
from eke.training.trace.allocator_model import CachingAllocator, PlainSum
from eke.training.trace.fake_device import FakeKernels
from eke.training.trace.operations import PRODUCTS, Questions, Workspaces

WEIGHTS, GRADIENTS, OPTIMIZER, MASTER = "weights", "gradients", "optimizer", "master"
STATES = (WEIGHTS, GRADIENTS, OPTIMIZER, MASTER)
ACTIVATIONS, LOGITS, AUTOCAST = "activations", "logits_and_loss", "autocast_cache"
BATCH, TEMPORARIES, WORKSPACES = "batch", "temporaries", "workspaces"
"""Kinds of storages. `master`: float32 copies of 16-bit weights. `temporaries`: storages of a
backward pass or an optimizer step that end with it, and memory inside kernels. `workspaces`: memory
that PyTorch keeps for cuBLAS."""

Event = tuple[int, int]
"""Number of a storage and its bytes, negative when it is freed."""

EMPTY_CACHE: Event = (-1, 0)
"""Event of a cache release of the allocator."""


@dataclass
class History:
    """Events by phase."""

    events: list[Event] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)
    """Position of the first event, and name of each phase."""
    components: list[str] = field(default_factory=list)
    """Kind of each storage, by its number."""
    inexact: set[str] = field(default_factory=set)
    """Operators that allocate memory of unknown size."""

    def begin(self, phase: str) -> None:
        """Begin a phase. The peak of a phase without name is not recorded."""
        self.phases.append((len(self.events), phase))

    def born(self, num_bytes: int, component: str) -> int:
        """Record a new storage and return its number."""
        number = len(self.components)
        self.components.append(component)
        self.events.append((number, num_bytes))
        return number

    def died(self, number: int, num_bytes: int) -> None:
        """Record that a storage is freed."""
        self.events.append((number, -num_bytes))

    def repeat(self, start: int, end: int) -> None:
        """Repeat the events between two positions, except for storages that outlive the second."""
        numbers: dict[int, int] = {}
        window = self.events[start:end]
        passing = {number for number, num_bytes in window if num_bytes < 0}
        for number, num_bytes in window:
            if num_bytes > 0 and number in passing:
                numbers[number] = self.born(num_bytes, self.components[number])
            elif number in numbers:
                self.died(numbers[number], -num_bytes)

    def spans(self) -> Iterator[tuple[str, list[Event]]]:
        """Yield each phase with its events, in order. A phase can occur several times."""
        ends = [position for position, _ in self.phases[1:]] + [len(self.events)]
        for (start, phase), end in zip(self.phases, ends, strict=True):
            yield phase, self.events[start:end]


def replay(
    history: History, allocator: CachingAllocator | PlainSum, apart: tuple[str, ...] = STATES
) -> Traced:
    """Replay a history with an empty allocator. `apart` are kinds shared between processes."""
    allocated: dict[str, int] = {}
    reserved: dict[str, int] = {}
    beside: dict[str, int] = {}
    highest, highest_at, most, position, alive_beside = -1, 0, 0, 0, 0
    for phase, events in history.spans():
        peak, peak_beside = allocator.allocated, alive_beside
        for number, num_bytes in events:
            position += 1
            if number >= 0 and history.components[number] not in apart:
                alive_beside += num_bytes
                peak_beside = max(peak_beside, alive_beside)
            if num_bytes > 0:
                allocator.malloc(number, num_bytes)
                peak = max(peak, allocator.allocated)
                most = max(most, allocator.reserved)
                if phase and allocator.allocated > highest:
                    highest, highest_at = allocator.allocated, position
            elif num_bytes < 0:
                allocator.free(number)
            else:
                allocator.empty_cache()
        if phase:
            allocated[phase] = max(allocated.get(phase, 0), peak)
            reserved[phase] = most
            beside[phase] = max(beside.get(phase, 0), peak_beside)
    in_use: Counter[str] = Counter()  # at the highest sum, by kind of storage
    for number, num_bytes in history.events[:highest_at]:
        if number >= 0:
            in_use[history.components[number]] += num_bytes
    return Traced(allocated, reserved, {k: n for k, n in in_use.items() if n}, beside=beside)


aten: Any = torch.ops.aten

_ADDITION, _ADDED = aten.add.Tensor, aten.add_.Tensor
_DEVICE_OF = torch.ops.prim.device.default


class StorageTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch 2.13
    """Mode that runs operators on fake tensors and records a device's storages."""

    supports_higher_order_operators = True
    """Compiled code recomputes attention inside a higher-order operator."""

    def __init__(
        self,
        mode: FakeTensorMode,
        device: torch.device,
        questions: Questions,
        workspaces: Workspaces,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13: no annotations
        self.history = History()
        self.kind = device.type
        self.inside_attention = False
        """True if scaled dot-product attention is running."""
        self._ghosts = FakeKernels(mode)
        self._questions = questions
        self._workspaces = workspaces
        self._alive: dict[int, tuple[int, Any]] = {}
        """Storage -> its number, and the reference whose callback records the release."""
        self._forgotten: set[int] = set()
        """Numbers of storages that still exist and are not counted."""
        self._handles: set[bool] = set()
        """Threads with a cuBLAS handle: false is the forward thread, true the backward thread."""
        self._phase = ""
        self._logits: tuple[int, int] | None = None
        """Elements and width of the logits, if there are any."""
        self._inside = False
        """True if an operator's Python function is running, which receives composite operators."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True to run torch.compile's graphs under this mode, without its own work."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            return args[0].fake_device if type(args[0]) is FakeTensor else args[0].device
        if func is _ADDITION and self._is_in_place(args):
            func = _ADDED
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            with self:
                return _with_random_state(func, args, kwargs)
        if func.namespace in _WRITTEN_IN_PYTHON and (body := _custom_op_function(func)) is not None:
            before = self._logits, self._inside
            # The fused loss makes only logits and tensors derived from them.
            any_shape = (1, 1) if func.namespace == "eke" else None
            self._logits, self._inside = self._logits or any_shape, True
            with self:
                out = body(*args, **kwargs)
            self._logits, self._inside = before
            return out
        if self._inside and _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        answer = self._questions.answer(func, args, kwargs)
        if answer is not NotImplemented:
            self._note(func, args, answer)
            return answer
        if self._workspaces.handle_bytes and func in PRODUCTS:
            self._use_handle()
        hidden = self._workspaces.bytes_of(func, args, kwargs)
        number = self.history.born(hidden, TEMPORARIES) if hidden else 0
        out = self._ghosts.answer(func, args, kwargs)
        self._note(func, args, out)
        if hidden:
            self.history.died(number, hidden)
        return out

    def begin(self, phase: str, counted: bool = True) -> None:
        """Begin a phase (`data` is recorded as `forward`), whose peak is recorded if `counted`."""
        self._phase = phase
        self._logits = self._logits if phase == "backward" else None
        self.history.begin(("forward" if phase == "data" else phase) if counted else "")

    def add(self, tensors: Iterable[Tensor], component: str) -> None:
        """Record existing tensors."""
        for tensor in tensors:
            if self._is_new(tensor, tensor.device):
                self._record(tensor, component)

    def call(self, tensors: Iterable[Tensor], component: str) -> None:
        """Set the kind of recorded storages."""
        for tensor in tensors:
            found = self._alive.get(tensor.untyped_storage()._cdata)
            if found:
                self.history.components[found[0]] = component

    def record_logits(self, logits: Tensor) -> None:
        """Record the model's logits. The following operations belong to the loss."""
        self.call([logits], LOGITS)
        self._logits = (logits.numel(), logits.shape[-1] if logits.dim() else 1)

    def forget(self, tensor: Tensor) -> None:
        """Stop counting a storage and its views, although it still exists."""
        storage = tensor.untyped_storage()
        found = self._alive.get(storage._cdata)
        if found is not None and found[0] not in self._forgotten:
            self._forgotten.add(found[0])
            self.history.died(found[0], storage.nbytes())

    def _use_handle(self) -> None:
        """Record the first product of a thread. Backward passes on a GPU have their own thread."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward not in self._handles:
            self._handles.add(in_backward)
            self.history.born(self._workspaces.handle_bytes, WORKSPACES)

    def _note(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        for made in out if type(out) in (tuple, list) else (out,):
            if type(made) is FakeTensor and self._is_new(made, made.fake_device):
                self._record(made, self._component(made, func, args))

    def _is_new(self, tensor: Tensor, device: torch.device) -> bool:
        return device.type == self.kind and tensor.untyped_storage()._cdata not in self._alive

    def _record(self, tensor: Tensor, component: str) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if not num_bytes:
            return
        number = self.history.born(num_bytes, component)
        alive, died, forgotten = self._alive, self.history.died, self._forgotten

        def end(_: Any) -> None:
            if alive.pop(key, None) is not None and number not in forgotten:
                died(number, num_bytes)

        alive[key] = (number, weakref.ref(storage, end))

    def _component(self, tensor: Tensor, func: Any, args: tuple[Any, ...]) -> str:
        phase = self._phase
        if phase in ("forward", "evaluation"):
            if func is aten._to_copy.default:
                # A weight or a view of one (experts' are transposed first).
                viewed = args[0]._base if args[0]._is_view() else args[0]
                if isinstance(viewed, torch.nn.Parameter):
                    return AUTOCAST
            return LOGITS if self._logits else ACTIVATIONS
        if phase == "backward":
            if self._logits and tensor.numel() >= self._logits[0] and self._logits[0] > 1:
                width = tensor.shape[-1] if tensor.dim() else 1
                return LOGITS if width == self._logits[1] else TEMPORARIES
            return ACTIVATIONS if torch.is_grad_enabled() else TEMPORARIES
        return BATCH if phase == "data" else TEMPORARIES

    def _is_in_place(self, args: tuple[Any, ...]) -> bool:
        """Return whether torch would add real tensors in place, but not subclasses of Tensor.

        Autograd (input_buffer.cpp, accumulate) and plain attention (attention.cpp) do it.
        """
        first = args[0]
        if type(first) is not FakeTensor:
            return False
        if self.inside_attention:
            return bool(first.dim() == 4 and torch.is_tensor(args[1]))
        return _is_owned_by_autograd(first)


def _with_random_state(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation whose random state is saved or set (torch 2.13, _prims/rng_prims.py)."""
    at = next(at for at, arg in enumerate(args) if isinstance(arg, OpOverload))
    kwargs.pop("rng_state", None)
    out = args[at](*args[at + 1 :], **kwargs)
    return (torch.get_rng_state(), out) if func is run_and_save_rng_state else out


_WRITTEN_IN_PYTHON = ("eke", "transformers")
"""Namespaces of operators that are Python functions: fused loss, grouped products."""


@functools.cache
def _is_composite(func: Any) -> bool:
    """Return whether an operator is only a C++ function of other operators."""
    has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has_kernel(func.name(), "CompositeImplicitAutograd"))


@functools.cache
def _custom_op_function(func: Any) -> Callable[..., Any] | None:
    """Return the function of an operator of `torch.library.custom_op`."""
    from torch._library.custom_ops import OPDEFS

    found = OPDEFS.get(func._schema.name)
    return None if found is None else found._init_fn


ENGINE_TENSOR_USES, ENGINE_STORAGE_USES = 4, 2
"""References to a gradient that only autograd holds: the engine's, the argument's and
Python's (tests/unit/training/trace/test_traps.py). Additions of a graph or a function lack the
engine's."""


def _is_owned_by_autograd(gradient: Tensor) -> bool:
    """Return whether only autograd holds a gradient, so that it adds the next one in place."""
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    storage: Any = gradient.untyped_storage()
    counted: Any = gradient
    uses = torch._C._storage_Use_Count
    return bool(
        counted._use_count() == ENGINE_TENSOR_USES
        and uses(storage._cdata) <= ENGINE_STORAGE_USES
        and storage.nbytes() == gradient.numel() * gradient.itemsize
    )


def watched_attention(trace: StorageTrace) -> Any:
    """Return a context that sets the trace's flag while scaled dot-product attention runs."""
    true_call = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> Any:
        # torch.compile follows an assignment, but not mock.patch.
        before, trace.inside_attention = trace.inside_attention, True
        try:
            return true_call(*args, **kwargs)
        finally:
            trace.inside_attention = before

    return mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", watched)
