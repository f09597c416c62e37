"""Attention implementations, and what a training step really ran.

An implementation is a request: PyTorch picks the kernel for the mask, format and device at hand,
autocast picks the format. `KernelProbe` watches the operations of one step and says which it was.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATTENTION: dict[str, str] = {
    "eager": "eager",
    "sdpa": "sdpa",
    "flash2": "flash_attention_2",
    "flash3": "flash_attention_3",
    "flex": "flex_attention",
}
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

SCORES_DIM = 4
"""Attention scores are (samples, heads, queries, keys); a router's are (tokens, experts)."""

PACKAGES: dict[str, str] = {"flash_attn": "flash2", "flash_attn_3": "flash3"}
"""Namespace of a package's operations -> kernel. Source: the `torch.library` calls of
https://github.com/Dao-AILab/flash-attention (flash_attn_interface.py, hopper/)."""

LOSSES: dict[str, str] = {
    "nll_loss_forward": "cross_entropy",
    "_linear_cross_entropy_batch_chunked": "linear_cross_entropy",
    "_linear_cross_entropy_batch_chunked_no_reduction": "linear_cross_entropy",
}
"""Operation that gives away how the loss is computed -> its name; the latter two are torch 2.13's.
"""

MATMULS = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_grouped_mm",
        "grouped_mm_fallback",
        "grouped_mm_fallback_backward",
        "_scaled_mm",
        "_linear_pointwise",
    }
)
"""Matrix multiplications: aten's (grouped: of experts), transformers' of experts where PyTorch's
does not run, and the oneDNN one inductor calls on a CPU in 16 bits."""


FACTORS_FIRST = frozenset(
    {"_scaled_mm", "_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward"}
)
"""Products with something else behind their factors: scales in float32, offsets in int32."""


@dataclass(frozen=True)
class Seen:
    """What ran between entering and leaving a probe."""

    attention_kernels: tuple[str, ...]
    """Values of `KERNELS`, sorted; empty when a compiler fused the softmax into code of its own."""
    matmul_dtypes: tuple[str, ...]
    """Formats of the operands, most frequent first: `bfloat16`."""
    num_matmuls: int
    """Matrix multiplications, forward and backward; not those inside attention and loss kernels."""
    loss_kernels: tuple[str, ...] = ()
    """Values of `LOSSES`, sorted."""


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

    supports_higher_order_operators = True
    """Compiled code that recomputes what draws random numbers runs it inside an operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13: no annotations
        self._kernels: set[str] = set()
        self._losses: set[str] = set()
        self._dtypes: Counter[str] = Counter()
        self._flex = contextlib.ExitStack()

    def __enter__(self) -> "KernelProbe":
        self._flex.enter_context(_watch_flex(self._kernels))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch 2.13
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch 2.13
        self._flex.close()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch.compile's code run under this mode; the default silently runs it eagerly."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Notes the operation, then runs it."""
        self._note(*_innermost(func, args))
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        name = getattr(func, "overloadpacket", func).__name__
        kernel = KERNELS.get(name) or PACKAGES.get(getattr(func, "namespace", ""))
        if kernel and not (name == "_softmax" and args[0].dim() != SCORES_DIM):
            self._kernels.add(kernel)
        if name in LOSSES:
            self._losses.add(LOSSES[name])
        if name in MATMULS and not _is_outer(name, args):
            factors = args[:2] if name in FACTORS_FIRST else args
            self._dtypes[_operand_dtype(factors)] += 1

    def seen(self) -> Seen:
        """What has run so far; may be asked inside the block and after it."""
        return Seen(
            attention_kernels=tuple(sorted(self._kernels)),
            matmul_dtypes=tuple(name for name, _ in self._dtypes.most_common()),
            num_matmuls=sum(self._dtypes.values()),
            loss_kernels=tuple(sorted(self._losses)),
        )


def _innermost(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The operation that one of a higher order runs (with the random state kept, say)."""
    if isinstance(func, torch._ops.HigherOrderOperator):
        for at, arg in enumerate(args):
            if isinstance(arg, torch._ops.OpOverload):
                return arg, args[at + 1 :]
    return func, args


@contextlib.contextmanager
def _watch_flex(kernels: set[str]) -> Iterator[None]:
    """Notes calls of FlexAttention, whose generated kernel is no operation that a mode could see.

    Within code that torch.compile has traced before, the call is not made again.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = ATTENTION["flex"]
    true_call = ALL_ATTENTION_FUNCTIONS[name]

    def noted(*args: Any, **kwargs: Any) -> Any:
        kernels.add("flex")
        return true_call(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = noted
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = true_call


def _is_outer(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a product sums nothing up: rotary angles in transformers 5.17 are one, in float32."""
    return name == "bmm" and bool(args[1].shape[-2] == 1)


def _operand_dtype(args: tuple[Any, ...]) -> str:
    """Format of the last positional tensor: a factor, where addmm's first tensor is the addend."""
    dtypes = [arg.dtype for arg in args if isinstance(arg, torch.Tensor)]
    return str(dtypes[-1]).removeprefix("torch.") if dtypes else "unknown"
