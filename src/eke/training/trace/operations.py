"""Operations of a memory trace: data-dependent results, CPU scratch memory, CUDA attention.

Some CPU kernels size their scratch memory at run time. So each distinct call runs once on real
zeros under the profiler, and the result is cached for the process. Source of the attention kernels:
torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and attention.cpp. cuDNN's kernel
keeps the same tensors as the flash kernel.
"""

import sys
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map

from eke.common.errors import RunError
from eke.plan.planner.planner import FLASH_CAPABILITY, workspace_bytes
from eke.training.trace.fake_device import call_key

aten: Any = torch.ops.aten

_ROW_BYTES = 16
"""Alignment in bytes of the rows of a grouped product."""


class Questions:
    """Data-dependent results for a batch with equal rows."""

    def __init__(self, padded: bool, mode: FakeTensorMode, is_own: bool = False) -> None:
        self.padded = padded
        """True if a row is padded, so that the batch's mask is not all ones."""
        self.is_own = is_own
        """True if own code runs, whose questions have no answer."""
        self.inexact: set[str] = set()
        """Operators of own code whose kernels allocate memory of unknown size."""
        self._mode = mode

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result, or NotImplemented if it follows from shapes.

        RunError: Own code reads the values of a tensor.
        """
        if self.is_own:
            self._note_own(func, args)
        if func is aten._local_scalar_dense.default:
            if args[0].dtype == torch.bool:
                return not self.padded
            return 1.0 if args[0].is_floating_point() else 1
        if func is aten.unique_consecutive.default:
            # T5's classifier checks that all rows have the same number of ends of text, which is
            # true.
            device = args[0].device
            return tuple(self._make_empty((n,), torch.int64, device) for n in (1, 0, 0))
        if func is aten.index.Tensor and _picks_by_truth(args[1]):
            # T5's classifier reads each row's end of text: [rows, length, width] -> [rows, width].
            shape = (args[0].shape[0], *args[0].shape[2:])
            return self._make_empty(shape, args[0].dtype, args[0].device)
        if func is aten._grouped_mm.default:
            offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
            return self._grouped(args[0], args[1], offsets)
        return NotImplemented

    def _note_own(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func.__name__.partition(".")[0]
        by_value = func is aten.index.Tensor and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if (by_value or name in _BY_VALUE) and (place := _asking_line()):
            raise RunError(f"{place} reads the values of a tensor")
        if "rnn" in name or "lstm" in name or "gru" in name:
            self.inexact.add(name)
        if name.startswith("convolution") and args[0].dim() == 3:
            self.inexact.add("convolution of one dimension")

    def _grouped(self, one: Any, other: Any, offsets: Any) -> Any:
        """Return products of groups of rows as torch/_meta_registrations.py, also in float32."""
        if one.dim() == 2 and other.dim() == 2:
            shape: tuple[int, ...] = (offsets.shape[0], one.shape[0], other.shape[1])
        elif one.dim() == 2:
            shape = (one.shape[0], other.shape[-1])
        elif other.dim() == 2:
            shape = (one.shape[1], other.shape[1])
        else:
            shape = (*one.shape[:2], other.shape[-1])
        width = -(-shape[-1] * one.itemsize // _ROW_BYTES) * _ROW_BYTES // one.itemsize
        whole = self._make_empty((*shape[:-1], width), one.dtype, one.device)
        return whole[..., : shape[-1]] if width != shape[-1] else whole

    def _make_empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        with self._mode:
            return torch.empty(shape, dtype=dtype, device=device)


_BY_VALUE = ("_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2")
"""Operators whose result depends on values."""


def _asking_line() -> str:
    """Return `file:line` of the innermost frame outside torch and eke, "" for transformers."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module == "transformers":
            return ""
        if module not in ("torch", "eke", "contextlib") and module not in sys.stdlib_module_names:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _picks_by_truth(indices: Any) -> bool:
    only = len(indices) == 1 and indices[0] is not None
    return bool(only and indices[0].dtype == torch.bool and indices[0].dim() == 2)


_HALF = (torch.float16, torch.bfloat16)

PRODUCTS = {
    *(getattr(aten, name).default for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm")),
    *(getattr(aten, name).out for name in ("mm", "addmm", "bmm", "baddbmm")),
}
"""Products, in 16 bits of oneDNN. In float32 the BLAS library does not allocate from PyTorch."""

_OTHERS = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten.native_layer_norm_backward.default,
    aten.embedding_dense_backward.default,
    aten.sort.default,
}
"""Kernels that use scratch memory in all formats."""

_MAX_BYTES = 2**31
"""Largest arguments of a call that is run: larger calls would take too long."""

_answers: dict[Any, int] = {}


def _measure(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the peak bytes inside a kernel, without its results."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if sum(t.numel() * t.itemsize for t in tensors) > _MAX_BYTES:
        return 0
    args, kwargs = tree_map(_zeros, (args, kwargs))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        try:
            results = func(*args, **kwargs)
        except RuntimeError:
            # Fake statistics of a mixed layer norm have a format that the real kernel rejects.
            return 0
    profiler: Any = seen.profiler
    events = profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    running = [0, *accumulate(num_bytes for _, num_bytes in changes)]
    del results
    return int(max(running) - max(running[-1], 0))


def _zeros(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()


_FLASH_HEAD_DIM = 256
"""Largest head dimension of the flash kernel (check_head_dim_size_flash)."""

_MASK_ALIGNMENT = 16
"""Multiple of elements to which the memory-efficient kernel pads a mask's rows."""


capability: tuple[int, int] = FLASH_CAPABILITY
"""Compute capability of the traced GPU, set before each trace."""


def register_attention() -> object:
    """Give the fake device CUDA's attention kernels for the life of the returned object."""
    library: Any = torch.library  # torch 2.13 annotates neither the class nor its methods
    rules = library.Library("aten", "IMPL")
    rules.impl("scaled_dot_product_attention", _traced_attention, "AutogradPrivateUse1")
    return rules


def choose_kernel(query: Tensor, key: Tensor, mask: Tensor | None) -> str:
    """Return `flash`, `efficient` or `math`, among the enabled kernels."""
    switches: Any = torch.backends.cuda
    same_heads = query.shape[1] == key.shape[1]
    flash = switches.flash_sdp_enabled() or switches.cudnn_sdp_enabled()
    fits = query.dtype in _HALF and query.shape[-1] <= _FLASH_HEAD_DIM
    if flash and fits and mask is None and capability >= FLASH_CAPABILITY:
        return "flash"
    half_too_new = query.dtype is torch.bfloat16 and capability < FLASH_CAPABILITY
    if switches.mem_efficient_sdp_enabled() and same_heads and not half_too_new:
        return "efficient"
    return "math"


def _traced_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` as decomposed on CUDA."""
    kind = choose_kernel(query, key, attn_mask)
    if kind == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:  # convert_boolean_attn_mask
        hidden = torch.full((), -torch.inf, dtype=query.dtype, device=query.device)
        mask = torch.where(mask, 0.0, hidden)
    found: tuple[Tensor, ...]
    if kind == "efficient":
        if mask is not None:
            length = mask.shape[-1]
            if missing := -length % _MASK_ALIGNMENT:  # preprocess_mask
                mask = F.pad(mask, (0, missing))[..., :length]
            mask = mask.expand(*query.shape[:-1], key.size(-2))
        needs_lse = query.requires_grad or key.requires_grad or value.requires_grad
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, needs_lse, dropout_p, is_causal, scale=scale
        )
    else:
        found = aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return found[0]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    width = query.shape[-1]
    if missing := -width % 8:  # heads are padded to a multiple of 8 (pad_last_dim)
        scale = width**-0.5 if scale is None else scale
        query, key, value = (F.pad(x, (0, missing)) for x in (query, key, value))
    found: Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, scale=scale
    )[0]
    return found[..., :width] if missing else found


_Rule = Callable[[tuple[Any, ...], dict[str, Any]], int]
"""Function from arguments of an operator to peak bytes inside its kernel, without results."""


class Workspaces:
    """Memory inside the kernels of one kind of device."""

    def __init__(self, kind: str, capability: tuple[int, int] | None = None) -> None:
        self._measures = kind == "cpu"
        self._rules = _CPU_RULES if kind == "cpu" else _GPU_RULES
        self.handle_bytes = workspace_bytes(capability) if kind == "cuda" else 0
        """Bytes that each thread's first product allocates permanently."""

    def bytes_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the bytes inside the kernel of an operator."""
        rule = self._rules.get(func)
        if rule is not None:
            return rule(args, kwargs)
        takes_scratch = func in _OTHERS or func.namespace == "bitsandbytes"
        if func in PRODUCTS:
            takes_scratch = any(isinstance(a, Tensor) and a.dtype in _HALF for a in args)
        if not (self._measures and takes_scratch):
            return 0
        key = call_key(func, args, kwargs)
        if key not in _answers:
            _answers[key] = _measure(func, args, kwargs)
        return _answers[key]


def _copied_operand_bytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes of operands that a CPU copies (TensorIterator.cpp, compute_types)."""
    common = _common_dtype(args)
    others = [t for t in args if isinstance(t, torch.Tensor) and t.dtype != common]
    return sum(tensor.numel() * common.itemsize for tensor in others)


def _mixed_in_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return `_copied_operand_bytes`, plus a copy of the first operand as the output."""
    common = _common_dtype(args)
    output = 0 if args[0].dtype == common else args[0].numel() * common.itemsize
    return _copied_operand_bytes(args, kwargs) + int(output)


def _common_dtype(args: tuple[Any, ...]) -> torch.dtype:
    """Return the format to which operands are promoted. Scalar tensors have lower priority."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    common = tensors[0]
    for tensor in tensors[1:]:
        dtype = torch.result_type(common, tensor)
        if dtype != common.dtype:
            common = tensor if tensor.dtype == dtype else common
    return common.dtype


def _reduced_wider(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes of a reduction's converted input (ReduceOpsUtils.h, make_reduction)."""
    dtype = kwargs.get("dtype")
    tensor = args[0]
    return 0 if dtype in (None, tensor.dtype) else int(tensor.numel() * dtype.itemsize)


def _flash_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes of query sums and shared keys' gradients (flash_api.cpp, mha_bwd)."""
    (rows, heads, length, width), keys = args[1].shape, args[2]
    sums = torch.float32.itemsize * rows * heads * (length + -length % 128) * (width + -width % 32)
    shared = keys.shape[1] != heads
    return int(sums + shared * 2 * rows * heads * keys.shape[2] * width * keys.itemsize)


_POINTWISE = ("add", "sub", "mul", "div")

_GPU_RULES: dict[Any, _Rule] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    # grad * output is computed before the kernel: https://github.com/pytorch/pytorch/issues/145866
    aten._softmax_backward_data.default: lambda args, _: int(args[0].nbytes),
}

_CPU_RULES: dict[Any, _Rule] = {
    **{getattr(aten, name).Tensor: _copied_operand_bytes for name in _POINTWISE},
    **{getattr(aten, f"{name}_").Tensor: _mixed_in_place for name in _POINTWISE},
    **{getattr(aten, name).default: _copied_operand_bytes for name in ("addcmul", "addcdiv")},
    **{getattr(aten, name).default: _mixed_in_place for name in ("addcmul_", "addcdiv_")},
    aten.linalg_vector_norm.default: _reduced_wider,
    aten.sum.dim_IntList: _reduced_wider,
    aten.mean.dim: _reduced_wider,
}
