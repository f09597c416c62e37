"""CUDA's autocast for the fake GPU: which operators run in 16 bits, and what that allocates.

Source: aten/src/ATen/autocast_mode.h, torch 2.13 (AT_FORALL_LOWER_PRECISION_FP and its siblings).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

aten: Any = torch.ops.aten

LOWER_PRECISION = frozenset(
    [
        "_convolution",
        "_convolution.deprecated",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_tbc",
        "conv_transpose1d",
        "conv_transpose2d.input",
        "conv_transpose3d.input",
        "convolution",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "prelu",
        "addmm",
        "addmv",
        "addr",
        "matmul",
        "einsum",
        "mm",
        "mv",
        "linalg_vecdot",
        "linear",
        "addbmm",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "linalg_multi_dot",
        "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
        "_scaled_dot_product_flash_attention",
        "scaled_dot_product_attention",
    ]
)
"""Operators that autocast runs in its 16-bit format."""

PROMOTED = frozenset(
    [
        "addcdiv",
        "addcmul",
        "atan2",
        "bilinear",
        "cross",
        "dot",
        "vdot",
        "grid_sampler",
        "index_put",
        "tensordot",
        "scatter_add",
    ]
)
"""Operators that run in the widest format of their arguments."""

FLOAT32_RESULT = frozenset(
    [
        "prod",
        "prod.dim_int",
        "softmax.int",
        "log_softmax.int",
        "cumprod",
        "cumsum",
        "sum",
        "sum.dim_IntList",
    ]
)
"""Operators that are told to answer in float32."""

_FUSED_CAST = {
    aten.softmax.int: aten._softmax.default,
    aten.log_softmax.int: aten._log_softmax.default,
}
"""From float16 to float32 inside the kernel, on CUDA alone (aten/src/ATen/native/SoftMax.cpp)."""

weight_copies: dict[int, torch.Tensor] = {}
"""16-bit copies of weights by `id`: real memory until the outermost autocast region ends."""


def known_operators() -> frozenset[str]:
    """Operators that this torch has a rule for on CUDA."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    has_rule: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(n.removeprefix("aten::") for n in names if has_rule(n, "AutocastCUDA"))


def drift() -> list[str]:
    """Names in the lists above that this torch has no rule for: the lists are of another version.

    Every other operator with a rule runs in float32, so a new one of lower precision goes unseen
    here; the count of rules is tested, too.
    """
    return sorted((LOWER_PRECISION | PROMOTED | FLOAT32_RESULT) - known_operators())


def register_autocast(device: str) -> object:
    """Give the fake device CUDA's rules; they hold as long as the object that is returned.

    Raises:
        RuntimeError: this torch has other rules than these lists.
    """
    if unknown := drift():
        raise RuntimeError(f"torch {torch.__version__} has other autocast rules: {unknown}")
    library: Any = torch.library  # torch 2.13 annotates neither the class nor its methods
    every, rules = library.Library("_", "IMPL"), library.Library("aten", "IMPL")
    every.fallback(library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in known_operators():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(aten, packet), overload or "default")
        kernel = autocast_kernel(operator, _policy(name), device)
        rules.impl(name, kernel, "AutocastPrivateUse1")
    return every, rules


def _policy(name: str) -> str:
    for policy, names in (
        ("lower", LOWER_PRECISION),
        ("promote", PROMOTED),
        ("result", FLOAT32_RESULT),
    ):
        if name in names:
            return policy
    return "float32"


def autocast_kernel(operator: Any, policy: str, device: str) -> Callable[..., Any]:
    """One operator under autocast.

    Args:
        operator: an overload of aten's.
        policy: `lower`, `promote`, `result` or `float32`.
        device: the device type whose tensors are cast.
    """
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
    """Whether autocast looks at a value: a floating tensor of the device, but for double."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.double
        and value.device.type == device
    )


def _cast(value: Any, dtype: torch.dtype, device: str) -> Any:
    """The value in another format; a weight's copy is kept until autocast ends."""
    if not _is_cast(value, device) or value.dtype == dtype:
        return value
    is_weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf
    if not (is_weight and not value._is_view() and torch.is_autocast_cache_enabled()):
        return value.to(dtype)
    if id(value) not in weight_copies:
        weight_copies[id(value)] = value.to(dtype)
    return weight_copies[id(value)]
