"""Whether attention on a GPU shares keys and values among query heads, or has them repeated."""

from eke.config.schema import Backend
from eke.plan.planner.plan import Plan

FLASH_CAPABILITY = (8, 0)
"""PyTorch's flash kernel and cuDNN's, the two that share them, need Ampere (sdp_utils.cpp)."""

HALF = ("float16", "bfloat16")
"""Formats that these two take."""


def shares_heads(plan: Plan, dtype: str | None = None) -> bool:
    """Whether a kernel can run that takes fewer key and value heads than query heads.

    Where none can, PyTorch (2.13) falls back to its plain path without a word, whose scores grow
    with the square of the length: its memory-efficient kernel wants as many heads of each.

    Args:
        plan: of the run.
        dtype: torch dtype name that attention computes in; that of the plan's training by default.
    """
    attention, device = plan.config.attention, plan.device
    if device.kind != "cuda" or attention.option != "sdpa":
        return True
    if attention.backend is Backend.mem_efficient:
        return False
    if attention.backend is not Backend.auto:
        return True  # the one kernel that may run is another
    new_enough = (device.capability or FLASH_CAPABILITY) >= FLASH_CAPABILITY
    return new_enough and (dtype or plan.compute.matmul) in HALF
