"""What CPU kernels take while they run, asked of the kernels themselves.

Some size their scratch memory when they run: oneDNN's products in 16 bits by the processor's
instructions, attention and normalisation by the number of threads. So each distinct call of a trace
runs once on real tensors of zeros under the profiler, and the answer is kept for the process.
"""

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map

aten: Any = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)

PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
"""In 16 bits they are oneDNN's; in float32 the BLAS library takes nothing from PyTorch."""

OTHERS = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten.native_layer_norm_backward.default,
        aten.embedding_dense_backward.default,
        aten.sort.default,
    }
)
"""Kernels that take scratch memory in every format."""

MAX_BYTES = 2**31
"""Calls with larger arguments are not run: the answer would cost more than it is worth."""

_answers: dict[Any, int] = {}


def takes_scratch(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call is one of those that are asked."""
    if func in PRODUCTS:
        return any(isinstance(a, torch.Tensor) and a.dtype in HALF for a in args)
    return func in OTHERS or func.namespace == "bitsandbytes"


def scratch_bytes(key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The most that was allocated at once inside a kernel, results left out.

    Args:
        key: says all that the answer depends on.
        func: the operator.
        args: with fake tensors.
        kwargs: the same.
    """
    if key not in _answers:
        _answers[key] = _measure(func, args, kwargs)
    return _answers[key]


def _measure(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if sum(t.numel() * t.itemsize for t in tensors) > MAX_BYTES:
        return 0
    args, kwargs = tree_map(_zeros, (args, kwargs))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        try:
            results = func(*args, **kwargs)
        except RuntimeError:
            # Fake statistics of a mixed layer norm have a format that the true kernel refuses.
            return 0
    profiler: Any = seen.profiler
    events = profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    running = highest = 0
    for _, num_bytes in changes:
        running += num_bytes
        highest = max(highest, running)
    del results
    return highest - max(running, 0)


def _zeros(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
