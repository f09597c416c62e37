"""Fake tensor cache, CUDA autocast rules, and patches of libraries for memory traces.

New tensors and views are cached for the process by operator, shapes, strides and formats:
FakeTensorMode's own cache takes twice as long. Source of the autocast rules: torch 2.13,
aten/src/ATen/autocast_mode.h (AT_FORALL_LOWER_PRECISION_FP and related macros).
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves, tree_map

from eke.training.model import fused_loss
from eke.training.model.loss import compiled_loss_sum

aten: Any = torch.ops.aten

_Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Shape, strides, format and device of a new tensor."""

_UNMARKED_VIEWS = frozenset({aten._unsafe_view.default, aten._reshape_alias.default})
"""Operators that return a view, contrary to their schemas."""

_SLOW = object()
"""Marker of an operator or a call that FakeTensorMode must run each time."""


@functools.cache
def _kind(operator: Any) -> str:
    """Return `new`, `view` or `slow`: the relation of an operator's results to its arguments."""
    tags, schema = operator.tags, operator._schema
    results = [result.alias_info for result in schema.returns]
    by_data = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
    if by_data or operator.namespace != "aten" or schema.is_mutable or not results:
        return "slow"
    if all(alias is None for alias in results):
        return "view" if operator in _UNMARKED_VIEWS else "new"
    return "view" if len(results) == 1 else "slow"


class FakeKernels:
    """Cache of operators' results on fake tensors of one device."""

    _made: dict[tuple[Any, ...], Any] = {}  # noqa: RUF012  # shared by all traces

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode

    def answer(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the operator's result."""
        kind = _kind(operator)
        if kind == "slow" or (kind == "view" and type(args[0]) is not FakeTensor):
            return self._run_operator(operator, args, kwargs)
        viewed = args[0] if kind == "view" else None
        offset = None if viewed is None else viewed.storage_offset()
        key = (offset, call_key(operator, args, kwargs))
        try:
            made = self._made.get(key)
        except TypeError:  # an argument is not hashable
            return self._run_operator(operator, args, kwargs)
        if made is None:
            found = self._run_operator(operator, args, kwargs)
            self._made[key] = _describe(found) if viewed is None else _describe_view(found, viewed)
            return found
        if made is _SLOW:
            return self._run_operator(operator, args, kwargs)
        if viewed is not None:
            with torch._C._DisableTorchDispatch():
                empty = torch.empty(0, dtype=viewed.dtype, device="meta")
                empty.set_(viewed.untyped_storage(), *made)
                return FakeTensor(self.mode, empty, viewed.fake_device)
        if type(made) is list:
            return tuple(m if m is None else self._make(m) for m in made)
        return self._make(made)

    def _make(self, made: _Made) -> FakeTensor:
        shape, strides, dtype, device = made
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            return FakeTensor(self.mode, empty, device)

    def _run_operator(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.mode:
            return operator(*args, **kwargs)


def call_key(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key of a call: the operator, shapes, strides, formats and plain arguments."""
    return operator, _look(args), _look(kwargs) if kwargs else None


def _look(value: Any) -> Any:
    """Return the properties that the result can depend on, hashable if their parts are."""
    kind = type(value)
    if kind is FakeTensor:
        return value.shape, value.stride(), value.dtype, value.fake_device
    if kind is tuple or kind is list or kind is torch.Size:
        return tuple(map(_look, value))
    if kind is dict:
        return tuple((name, _look(part)) for name, part in value.items())
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.device)
    return kind, value


def _describe(found: Any) -> Any:
    """Return a description to make a result again, or `_SLOW` if there is none."""
    if isinstance(found, tuple | list):
        parts = [None if part is None else _made_of(part) for part in found]
        return _SLOW if _SLOW in parts else parts
    return _made_of(found)


def _describe_view(found: Any, viewed: Any) -> Any:
    if type(found) is not FakeTensor or found.dtype != viewed.dtype:
        return _SLOW
    if found.untyped_storage()._cdata != viewed.untyped_storage()._cdata:
        return _SLOW
    return found.storage_offset(), tuple(found.shape), found.stride()


def _made_of(found: Any) -> Any:
    whole = type(found) is FakeTensor and found.storage_offset() == 0
    if not whole or any(not isinstance(size, int) for size in found.shape):
        return _SLOW
    if found.untyped_storage().nbytes() != found.numel() * found.itemsize:
        return _SLOW
    return tuple(found.shape), found.stride(), found.dtype, found.fake_device


_LOWER_PRECISION = frozenset({
    "_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution",
    "cudnn_convolution", "cudnn_convolution_transpose", "prelu", "addmm", "addmv", "addr",
    "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm",
    "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
})  # fmt: skip
"""Operators that autocast runs in its 16-bit format."""

_PROMOTED = frozenset({
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put",
    "tensordot", "scatter_add",
})  # fmt: skip
"""Operators that run in the widest format of their arguments."""

_FLOAT32_RESULT = frozenset({
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum",
    "sum.dim_IntList",
})  # fmt: skip
"""Operators that autocast runs with float32 output."""

_FUSED_CAST = {
    aten.softmax.int: aten._softmax.default,
    aten.log_softmax.int: aten._log_softmax.default,
}
"""Operators that cast float16 inside the kernel, only on CUDA (native/SoftMax.cpp)."""

_weight_copies: dict[int, torch.Tensor] = {}
"""16-bit copies of weights by `id`: real memory until the outermost autocast region ends."""


def known_operators() -> frozenset[str]:
    """Return the operators with an autocast rule for CUDA in this torch."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    has_rule: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(n.removeprefix("aten::") for n in names if has_rule(n, "AutocastCUDA"))


def drift() -> list[str]:
    """Return names in the lists above without a rule in this torch, from another version."""
    return sorted((_LOWER_PRECISION | _PROMOTED | _FLOAT32_RESULT) - known_operators())


def register_autocast(device: str) -> object:
    """Give the fake device CUDA's rules for the life of the returned object."""
    if unknown := ", ".join(drift()):
        raise RuntimeError(f"torch {torch.__version__} has no autocast rule for {unknown}")
    library: Any = torch.library  # torch 2.13 annotates neither the class nor its methods
    every, rules = library.Library("_", "IMPL"), library.Library("aten", "IMPL")
    every.fallback(library.fallthrough_kernel, "AutocastPrivateUse1")
    policies = {"lower": _LOWER_PRECISION, "promote": _PROMOTED, "result": _FLOAT32_RESULT}
    for name in known_operators():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(aten, packet), overload or "default")
        policy = next((each for each, names in policies.items() if name in names), "float32")
        rules.impl(name, autocast_kernel(operator, policy, device), "AutocastPrivateUse1")
    return every, rules


def autocast_kernel(operator: Any, policy: str, device: str) -> Callable[..., Any]:
    """Return an operator under autocast. `policy` is `lower`, `promote`, `result` or `float32`."""
    keys: Any = torch._C.DispatchKey
    autocast_key = torch._C.DispatchKeySet(keys.AutocastPrivateUse1)
    names = [argument.name for argument in operator._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        kwargs |= zip(names, args, strict=False)
        floats = {x.dtype for x in tree_leaves(kwargs) if _is_cast(x, device)}
        dtype = torch.float32
        if policy == "lower" or (policy == "promote" and dtype not in floats):
            dtype = torch.get_autocast_dtype(device)
        exclude: Any = torch._C._ExcludeDispatchKeyGuard
        with exclude(autocast_key):
            if policy != "result":
                return operator(**tree_map(lambda x: _cast(x, dtype, device), kwargs))
            if floats and kwargs.get("dtype") is None:
                kwargs["dtype"] = dtype
            if operator in _FUSED_CAST and floats == {torch.half} and kwargs["dtype"] == dtype:
                return _FUSED_CAST[operator](kwargs["self"], kwargs["dim"], True)
            return operator(**kwargs)

    return kernel


def _is_cast(value: Any, device: str) -> bool:
    """Return whether autocast casts a value: a floating tensor of the device, except double."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.double
        and value.device.type == device
    )


def _cast(value: Any, dtype: torch.dtype, device: str) -> Any:
    """Return the value in another format. A weight's copy is kept until autocast ends."""
    if not _is_cast(value, device) or value.dtype == dtype:
        return value
    is_weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf
    if not (is_weight and not value._is_view() and torch.is_autocast_cache_enabled()):
        return value.to(dtype)
    if id(value) not in _weight_copies:
        _weight_copies[id(value)] = value.to(dtype)
    return _weight_copies[id(value)]


def not_compiled(function: Any = None, **_: Any) -> Any:
    """Replace `torch.compile` by the uncompiled function."""
    return function if function is not None else not_compiled


@contextlib.contextmanager
def fake_surroundings(compiler: Callable[..., Any] = not_compiled) -> Iterator[None]:
    """Patch libraries so that they accept fake tensors. `compiler` replaces `torch.compile`."""
    clear, generator = torch.clear_autocast_cache, torch.Generator
    only_from_host = torch._C._only_lift_cpu_tensors()

    def is_compiling(*_: Any) -> bool:
        return torch.compiler.is_compiling()

    def clear_autocast_cache() -> None:
        _weight_copies.clear()
        clear()

    patches: dict[str, Any] = {
        "torch.clear_autocast_cache": clear_autocast_cache,
        # A machine with GPUs traces as one without: PyTorch would query the driver, and compute
        # constants on a device without kernels (FakeTensorMode.avoid_device_init).
        "torch.cuda.is_available": lambda: False,
        # No gradient overflows: the loss scaler steps without reading the device.
        "torch.amp.GradScaler._maybe_opt_step": lambda _, optimizer, __, *args, **kwargs: (
            optimizer.step(*args, **kwargs)
        ),
        "torch.compile": compiler,
        # Separate caches of compiled code: a run in this process must not receive a trace's.
        "eke.training.model.fused_loss._compiled": functools.cache(
            fused_loss._compiled.__wrapped__
        ),
        "eke.training.model.loss.compiled_loss_sum": functools.cache(compiled_loss_sum.__wrapped__),
        # The fake device has no generator, and no values are drawn.
        "torch.Generator": lambda device=None: generator(),
        **dict.fromkeys(("torch.get_rng_state", "torch.random.get_rng_state"), _random_state),
        **dict.fromkeys(("torch.set_rng_state", "torch.random.set_rng_state"), nothing),
        # transformers 5 would mistake fake tensors for a captured graph, for which it builds masks
        # that an uncompiled run does not have.
        "transformers.masking_utils.is_tracing": is_compiling,
        "transformers.modeling_attn_mask_utils.is_tracing": is_compiling,
    }
    if "bitsandbytes" in sys.modules:
        patches |= {
            "bitsandbytes.optim.optimizer.Optimizer8bit.fill_qmap": _fake_tables,
            # Functions of its CUDA build.
            "bitsandbytes.functional.get_paged": _fake_pages,
            "bitsandbytes.functional.fill": nothing,
            "bitsandbytes.functional.prefetch_tensor": nothing,
        }
    with contextlib.ExitStack() as stack:
        # Run backward passes in this thread: the trace does not observe the device's thread.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        # `torch.tensor(value, device=...)` makes a tensor on the host, which is then moved as
        # others. FakeTensorMode sets this, but a trace enters it for one operator at a time.
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, only_from_host)
        for name, stand_in in patches.items():
            stack.enter_context(mock.patch(name, stand_in))
        listed: Any = (optimizers._foreach_supported_types, _foreach_utils._foreach_supported_types)
        for types in listed:  # otherwise foreach becomes a loop without a warning
            types.append(FakeTensor)
            stack.callback(types.remove, FakeTensor)
        stack.callback(_weight_copies.clear)
        yield


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of functions that restore states, fill memory or check addresses."""


_RANDOM_STATE_BYTES = torch.get_rng_state().numel()
"""Bytes of the state of the host's generator. Checkpointing keeps one for each layer."""


def _random_state() -> torch.Tensor:
    """Return an ordinary tensor, since the trace does not observe the real one."""
    return torch.empty(_RANDOM_STATE_BYTES, dtype=torch.uint8, device="cpu")


def _fake_tables(optimizer: Any) -> None:
    optimizer.name2qmap = {name: torch.empty(256) for name in ("dynamic", "udynamic")}


def _fake_pages(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return paged memory as the host's: the driver owns it, PyTorch does not reserve it."""
    pages: Any = torch.empty(shape, dtype=dtype, device="cpu")
    pages.is_paged, pages.page_deviceid = True, device.index
    return pages  # type: ignore[no-any-return]  # tensor with bitsandbytes' attributes


def to_fake(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """Replace a model's meta tensors in place, with ties. `Module.to` fails on fake parameters."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            with mode:
                new = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                )
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            made[id(tensor)] = new
        return made[id(tensor)]

    for module in model.modules():
        owners: Any = (module._parameters, module._buffers, vars(module))
        for owner in owners:
            owner |= {n: fake(x) for n, x in owner.items() if isinstance(x, torch.Tensor)}
    return model
