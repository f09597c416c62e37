"""Attention implementations, and what a training step really ran.

An implementation is a request: PyTorch picks the kernel for the mask, format and device at hand,
autocast picks the format. `KernelProbe` watches the operations of one step and says which it was.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATTENTION: dict[str, str] = {"eager": "eager", "sdpa": "sdpa"}
"""Option of the group `attention` -> transformers' `attn_implementation`."""

KERNELS: dict[str, str] = {
    "_softmax": "eager",
    "_safe_softmax": "math",
    "_scaled_dot_product_attention_math": "math",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash_cpu",
    "_scaled_dot_product_efficient_attention": "mem_efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "overrideable",
}
"""Operation that gives a kernel away -> its name: PyTorch's sdpa backends, and `eager` for a
softmax of its own (sdpa's plain path has `_safe_softmax`, losses have `_log_softmax`).
Source: torch's aten/src/ATen/native/native_functions.yaml."""

MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_linear_pointwise"})
"""Matrix multiplications: aten's, and the oneDNN one inductor calls on a CPU in 16 bits."""


@dataclass(frozen=True)
class Seen:
    """What ran between entering and leaving a probe."""

    attention_kernels: tuple[str, ...]
    """Values of `KERNELS`, sorted; empty when a compiler fused the softmax into code of its own."""
    matmul_dtypes: tuple[str, ...]
    """Formats of the operands, most frequent first: `bfloat16`."""
    num_matmuls: int
    """Matrix multiplications, forward and backward, those inside attention kernels not counted."""


class KernelProbe(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch 2.13
    """Watches the operations of one training step, forward and backward.

    Compiled code runs as compiled and is looked into. Under `torch.inference_mode` composite
    operations arrive whole and are not recognised; a training step has none of them. Slows the
    watched step down by one Python call per operation; do not time it.

    Example:
        with KernelProbe() as probe:
            train_step()
        probe.seen().attention_kernels   # ("flash",)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13: no annotations
        self._kernels: set[str] = set()
        self._dtypes: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch.compile's code run under this mode; the default silently runs it eagerly."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Notes the operation, then runs it."""
        name = getattr(func, "overloadpacket", func).__name__
        if name in KERNELS:
            self._kernels.add(KERNELS[name])
        if name in MATMULS:
            self._dtypes[_operand_dtype(args)] += 1
        return func(*args, **(kwargs or {}))

    def seen(self) -> Seen:
        """What has run so far; may be asked inside the block and after it."""
        return Seen(
            attention_kernels=tuple(sorted(self._kernels)),
            matmul_dtypes=tuple(name for name, _ in self._dtypes.most_common()),
            num_matmuls=sum(self._dtypes.values()),
        )


def _operand_dtype(args: tuple[Any, ...]) -> str:
    """Format of the last positional tensor: a factor, where addmm's first tensor is the addend."""
    dtypes = [arg.dtype for arg in args if isinstance(arg, torch.Tensor)]
    return str(dtypes[-1]).removeprefix("torch.") if dtypes else "unknown"
