"""Keys and values that several query heads share, for attention kernels that do not share them.

transformers leaves the sharing to PyTorch wherever there is no mask. On a GPU whose fused kernels
cannot share (`eke.plan.planner.shares_heads`) it must repeat the heads itself, as it does under a
mask.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from eke.plan.planner import Plan, shares_heads

FORMATS = (torch.float32, torch.float16, torch.bfloat16)
"""Attention computes in one of these."""

_ASKED = "use_gqa_in_sdpa"


def repeat_heads(plan: Plan) -> None:
    """Decide for this process, until the next plan; call before the first forward pass.

    Seen with transformers 5.23, which looks the function up at each call; in a version without it
    nothing is replaced, and tests/unit/training/model/test_grouped_heads.py tells.

    Args:
        plan: its device, attention and formats decide.
    """
    from transformers.integrations import sdpa_attention

    if not hasattr(sdpa_attention, _ASKED):
        return
    own = _transformers_own()
    shared = [dtype for dtype in FORMATS if shares_heads(plan, str(dtype).removeprefix("torch."))]

    def ask(mask: Tensor | None, key: Tensor, value: Tensor) -> bool:
        kind = key.device.type
        cast = torch.is_autocast_enabled(kind)  # which casts the operands of attention
        dtype = torch.get_autocast_dtype(kind) if cast else key.dtype
        return dtype in shared and bool(own(mask, key, value))

    vars(sdpa_attention)[_ASKED] = ask if len(shared) < len(FORMATS) else own


@functools.cache
def _transformers_own() -> Any:
    """As it was before anything replaced it."""
    from transformers.integrations import sdpa_attention

    return getattr(sdpa_attention, _ASKED)
