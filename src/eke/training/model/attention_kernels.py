"""Attention implementations, and detection of the kernels that ran in a step."""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from eke.common.errors import RunError
from eke.config.schema import Backend
from eke.plan.planner import Plan, avoids_cudnn, shares_heads
from eke.training.model.checkpointing import is_repeating

ATTENTION: dict[str, str] = {
    "eager": "eager",
    "sdpa": "sdpa",
    "flash2": "flash_attention_2",
    "flash3": "flash_attention_3",
    "flex": "flex_attention",
}
"""Option of the group `attention` -> transformers' `attn_implementation`."""

_KERNELS: dict[str, str] = {
    "_softmax": "eager",
    "_safe_softmax": "math",
    "_scaled_dot_product_attention_math": "math",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash_cpu",
    "_scaled_dot_product_efficient_attention": "mem_efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "overrideable",
}
"""Operation -> attention kernel that it reveals: PyTorch's sdpa backends, and `eager` for a
separate softmax (sdpa's plain path uses `_safe_softmax`, losses `_log_softmax`)."""

_PACKAGES: dict[str, str] = {"flash_attn": "flash2", "flash_attn_3": "flash3"}
"""Namespace of a package's operations -> kernel. Source: the `torch.library` calls of
https://github.com/Dao-AILab/flash-attention (flash_attn_interface.py, hopper/)."""

_LOSSES: dict[str, str] = {
    "nll_loss_forward": "cross_entropy",
    "linear_cross_entropy": "linear_cross_entropy",
}
"""Operation -> name of the loss computation that it reveals."""

_FACTORS_FIRST = frozenset(
    {"_scaled_mm", "_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward"}
)
"""Products with arguments after their factors: scales in float32, offsets in int32."""

_MATMULS = _FACTORS_FIRST | {"mm", "addmm", "addmm_", "bmm", "baddbmm", "_linear_pointwise"}
"""Matrix multiplications of aten (grouped: of experts), of transformers for experts where PyTorch's
is not available, and of oneDNN, which inductor uses on a CPU in 16 bits."""


class KernelProbe(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch 2.13
    """Observer of a step's operations (not in `torch.inference_mode`). Do not time the step."""

    supports_higher_order_operators = True
    """Compiled code recomputes random operations inside a higher-order operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13: no annotations
        self.attention_kernels: set[str] = set()
        """Values of `_KERNELS`. Empty if a compiler fused the softmax into generated code."""
        self.loss_kernels: set[str] = set()
        """Values of `_LOSSES`."""
        self.matmuls: Counter[str] = Counter()
        """Matrix multiplications, forward and backward, outside attention and loss kernels, by the
        format of their operands (`bfloat16`)."""
        self.repeated: Counter[str] = Counter()
        """Operations of forward passes that were repeated inside a backward pass."""
        self._flex = ExitStack()

    def __enter__(self) -> "KernelProbe":
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

        name = ATTENTION["flex"]
        true_call = FUNCTIONS[name]

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.attention_kernels.add("flex")
            return true_call(*args, **kwargs)

        # Modes do not detect the kernel of FlexAttention outside compiled code.
        # An entry of the instance would remain, and torch.compile would repeat the evaluation.
        FUNCTIONS.register(name, noted)
        self._flex.callback(FUNCTIONS.register, name, true_call)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch 2.13
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch 2.13
        self._flex.close()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True to run compiled code. By default, it would run eagerly without a warning."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented
        self._note(*_innermost(func, args))
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        name = getattr(func, "overloadpacket", func).__name__
        if is_repeating():
            self.repeated[name] += 1
        kernel = _KERNELS.get(name) or _PACKAGES.get(getattr(func, "namespace", ""))
        # Attention scores are (samples, heads, queries, keys); a router's are (tokens, experts).
        if kernel and not (name == "_softmax" and args[0].dim() != 4):
            self.attention_kernels.add(kernel)
        if name in _LOSSES:
            self.loss_kernels.add(_LOSSES[name])
        # An outer product is not counted: bmm in float32 for rotary angles in transformers 5.17.
        outer = name == "bmm" and args[1].shape[-2] == 1
        if name in _MATMULS and not outer:
            factors = args[:2] if name in _FACTORS_FIRST else args
            # Use the last tensor, a factor. addmm's first tensor is the addend.
            dtypes = [arg.dtype for arg in factors if isinstance(arg, Tensor)]
            self.matmuls[str(dtypes[-1]).removeprefix("torch.") if dtypes else "unknown"] += 1

    @property
    def matmul_dtypes(self) -> list[str]:
        """Formats of the operands of matrix multiplications, most frequent first."""
        return [name for name, _ in self.matmuls.most_common()]


def _innermost(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the operation inside a higher-order operation (one that keeps a random state)."""
    if isinstance(func, torch._ops.HigherOrderOperator):
        for at, arg in enumerate(args):
            if isinstance(arg, torch._ops.OpOverload):
                return arg, args[at + 1 :]
    return func, args


BACKENDS: dict[Backend, SDPBackend] = {
    Backend.flash: SDPBackend.FLASH_ATTENTION,
    Backend.mem_efficient: SDPBackend.EFFICIENT_ATTENTION,
    Backend.cudnn: SDPBackend.CUDNN_ATTENTION,
    Backend.math: SDPBackend.MATH,
}
"""`attention.backend` -> PyTorch's backend. auto: PyTorch chooses."""

EXPECTED: dict[Backend, frozenset[str]] = {
    **{backend: frozenset({backend.value}) for backend in BACKENDS},
    Backend.auto: frozenset({"flash", "flash_cpu", "mem_efficient", "cudnn", "math"}),
    Backend.flash: frozenset({"flash", "flash_cpu"}),
}
"""`attention.backend` -> kernels of `KernelProbe` that are valid for it."""


@contextmanager
def pinned_backend(plan: Plan) -> Iterator[None]:
    """Allow only the planned kernel inside the block, in all threads. RunError: invalid inputs."""
    attention = plan.config.attention
    pinned = BACKENDS.get(attention.backend) if attention.option == "sdpa" else None
    allowed = [*BACKENDS.values()] if pinned is None else [pinned]
    if pinned is None and avoids_cudnn(plan.config, plan.device):
        allowed.remove(SDPBackend.CUDNN_ATTENTION)
    with sdpa_kernel(allowed) if len(allowed) < len(BACKENDS) else nullcontext():
        try:
            yield
        except RuntimeError as error:
            # Messages of torch 2.11 to 2.13 when no allowed kernel supports the inputs.
            unsupported = any(s in str(error) for s in ("No available kernel", "No viable backend"))
            if pinned is None or not unsupported:
                raise
            why = "PyTorch's kernel does not support this model's inputs. Reasons are in the log."
            raise RunError(
                f"attention.backend = {attention.backend.value}: {why} -> attention.backend=auto"
            ) from error


_FORMATS = (torch.float32, torch.float16, torch.bfloat16)
"""Possible number formats of attention."""

_ASKED = "use_gqa_in_sdpa"


def repeat_heads(plan: Plan) -> None:
    """Repeat heads where kernels cannot share them. Call it before the first forward pass."""
    # Without a mask, transformers 5.23 leaves grouped-query attention to PyTorch, also on a GPU
    # without a fused kernel that can share heads (`shares_heads`; model/test_grouped_heads.py).
    from transformers.integrations import sdpa_attention

    if not hasattr(sdpa_attention, _ASKED):
        return
    own = _original(sdpa_attention, _ASKED)
    shared = [dtype for dtype in _FORMATS if shares_heads(plan, str(dtype).removeprefix("torch."))]

    def ask(mask: Tensor | None, key: Tensor, value: Tensor) -> bool:
        kind = key.device.type
        cast = torch.is_autocast_enabled(kind)  # also casts the operands of attention
        dtype = torch.get_autocast_dtype(kind) if cast else key.dtype
        return dtype in shared and bool(own(mask, key, value))

    vars(sdpa_attention)[_ASKED] = ask if len(shared) < len(_FORMATS) else own


@functools.cache
def _original(module: Any, name: str) -> Any:
    """Return a function of transformers as it was before its replacement."""
    return getattr(module, name)


def spare_mask_checks(model: torch.nn.Module, packed: bool = False) -> None:
    """Replace transformers' mask checks in this process. Call it before the first forward pass."""
    # Each forward pass would wait for the GPU twice, to detect packed sequences and trailing
    # padding. torch.compile would build a full mask, which PyTorch's flash kernel does not support.
    # Both answers are known from the configuration.
    from transformers import masking_utils
    from transformers import modeling_flash_attention_utils as flash

    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = (
            sequence_numbers if packed else lambda position_ids: None
        )
    if hasattr(flash, "_is_packed_sequence"):
        look = _original(flash, "_is_packed_sequence")
        vars(flash)["_is_packed_sequence"] = look if packed else lambda *_: False
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            # Bypass nn.Module.__setattr__, which is for parameters and submodules. Padding is
            # masked wherever attention could read it.
            vars(module)["warn_if_padding_and_no_attention_mask"] = lambda *_, **__: None


def sequence_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """Return each token's sequence number `[rows, length]`, which rises where a position is 0."""
    return (position_ids == 0).cumsum(-1)
