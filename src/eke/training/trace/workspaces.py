"""Memory that kernels take for themselves while they run; no tensor outside tells of it.

Each entry names its source. Nothing here is fitted to a measurement.
"""

from collections.abc import Callable
from typing import Any

import torch

from eke.training.trace.fake_tensor_cache import call_key
from eke.training.trace.host_kernels import scratch_bytes, takes_scratch

aten: Any = torch.ops.aten

Rule = Callable[[tuple[Any, ...], dict[str, Any]], int]
"""Arguments of an operator -> bytes that are alive at once inside its kernel, results left out."""


def cublas_bytes(capability: tuple[int, int] | None) -> int:
    """The workspace PyTorch gives cuBLAS, per thread: one computes forward, one backward passes.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: 32 MiB from Hopper
    on, and 2 x 4096 KiB + 8 x 16 KiB before.
    """
    return 32 * 2**20 if (capability or (0, 0)) >= (9, 0) else (2 * 4096 + 8 * 16) * 2**10


class Workspaces:
    """What the kernels of one kind of device take.

    Args:
        kind: of `Device`.
        capability: of a GPU, where it is known.
    """

    def __init__(self, kind: str, capability: tuple[int, int] | None = None) -> None:
        self._rules = RULES[kind]
        self._asks = kind == "cpu"
        self.handle_bytes = cublas_bytes(capability) if kind == "cuda" else 0
        """What each thread's first product allocates, for good."""

    def bytes_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Bytes inside the kernel of an operator."""
        rule = self._rules.get(func)
        if rule is not None:
            return rule(args, kwargs)
        if self._asks and takes_scratch(func, args):
            return scratch_bytes(call_key(func, args, kwargs), func, args, kwargs)
        return 0


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.itemsize)


def _mixed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Operands of mixed formats: on a CPU each is copied into the common one.

    Source: aten/src/ATen/TensorIterator.cpp, compute_types: inputs are promoted, and an output in
    another format (of an operation in place) is computed in a temporary. CUDA's kernels do it.
    """
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    formats = {tensor.dtype for tensor in tensors}
    if len(formats) < 2:
        return 0
    common = _common_dtype(args)
    return sum(t.numel() * common.itemsize for t in tensors if t.dtype != common)


def _mixed_in_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """As `_mixed`, and the first operand a second time, as the output."""
    first = args[0]
    hidden = _mixed(args, kwargs)
    if not hidden:
        return 0
    common = _common_dtype(args)
    return hidden + (first.numel() * common.itemsize if first.dtype != common else 0)


def _common_dtype(args: tuple[Any, ...]) -> torch.dtype:
    """The format that operands are promoted to: tensors of no dimension count for less."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    common = tensors[0]
    for tensor in tensors[1:]:
        dtype = torch.result_type(common, tensor)
        if dtype != common.dtype:
            common = tensor if tensor.dtype == dtype else common
    return common.dtype


def _reduced_wider(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """A reduction that answers in another format converts its whole input first, on a CPU.

    Source: aten/src/ATen/native/ReduceOpsUtils.h, make_reduction.
    """
    dtype = kwargs.get("dtype")
    tensor = args[0]
    return 0 if dtype in (None, tensor.dtype) else int(tensor.numel() * dtype.itemsize)


_POINTWISE = ("add", "sub", "mul", "div")

GPU_RULES: dict[Any, Rule] = {
    # grad * output is made before the kernel runs: https://github.com/pytorch/pytorch/issues/145866
    aten._softmax_backward_data.default: lambda args, _: _bytes(args[0]),
}

CPU_RULES: dict[Any, Rule] = {
    **{getattr(aten, name).Tensor: _mixed for name in _POINTWISE},
    **{getattr(aten, f"{name}_").Tensor: _mixed_in_place for name in _POINTWISE},
    aten.addcmul.default: _mixed,
    aten.addcdiv.default: _mixed,
    aten.addcmul_.default: _mixed_in_place,
    aten.addcdiv_.default: _mixed_in_place,
    aten.linalg_vector_norm.default: _reduced_wider,
    aten.sum.dim_IntList: _reduced_wider,
    aten.mean.dim: _reduced_wider,
}

RULES = {"cuda": GPU_RULES, "cpu": CPU_RULES}
"""`Device.kind` -> what its kernels take."""
