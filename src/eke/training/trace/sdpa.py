"""Which attention kernel CUDA would run, for the fake GPU.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (use_flash_attention,
use_mem_efficient_attention) and attention.cpp (scaled_dot_product_attention), torch 2.13. cuDNN's
kernel, which some torch prefer on Hopper, keeps what the flash kernel keeps: output and logsumexp.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten: Any = torch.ops.aten

FLASH_CAPABILITY = (8, 0)
"""The flash kernel of PyTorch needs Ampere (check_flash_attention_hardware_support)."""

FLASH_HEAD_DIM = 256
"""Its widest head (check_head_dim_size_flash)."""

MASK_ALIGNMENT = 16
"""Numbers to a multiple of which the memory-efficient kernel wants a mask's rows padded."""

HALF = (torch.float16, torch.bfloat16)

capability: tuple[int, int] = FLASH_CAPABILITY
"""Of the GPU that is traced; set before each trace."""


def register_attention() -> object:
    """Give the fake device CUDA's choice; it holds as long as the object that is returned."""
    library: Any = torch.library  # torch 2.13 annotates neither the class nor its methods
    rules = library.Library("aten", "IMPL")
    rules.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
    return rules


def choose(query: Tensor, key: Tensor, mask: Tensor | None) -> str:
    """`flash`, `efficient` or `math`, of those that are switched on."""
    switches: Any = torch.backends.cuda
    same_heads = query.shape[1] == key.shape[1]
    flash = switches.flash_sdp_enabled() or switches.cudnn_sdp_enabled()
    if (
        flash
        and mask is None
        and query.dtype in HALF
        and capability >= FLASH_CAPABILITY
        and query.shape[-1] <= FLASH_HEAD_DIM
    ):
        return "flash"
    half_too_new = query.dtype is torch.bfloat16 and capability < FLASH_CAPABILITY
    if switches.mem_efficient_sdp_enabled() and same_heads and not half_too_new:
        return "efficient"
    return "math"


def attention(
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
    """`torch.nn.functional.scaled_dot_product_attention` as CUDA takes it apart."""
    kind = choose(query, key, attn_mask)
    if kind == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if kind == "efficient":
        mask = _additive(attn_mask, query)
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:-1], key.size(-2))
        needs_lse = query.requires_grad or key.requires_grad or value.requires_grad
        found: Tensor = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, needs_lse, dropout_p, is_causal, scale=scale
        )[0]
        return found
    mask = _additive(attn_mask, query)
    plain: Tensor = aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return plain


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


def _aligned(mask: Tensor) -> Tensor:
    """Rows of a mask begin at multiples of 16 numbers (preprocess_mask)."""
    length = mask.shape[-1]
    missing = -length % MASK_ALIGNMENT
    return F.pad(mask, (0, missing))[..., :length] if missing else mask


def _additive(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask of truth values as one to be added (convert_boolean_attn_mask)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    hidden = torch.full((), -torch.inf, dtype=query.dtype, device=query.device)
    return torch.where(mask, 0.0, hidden)
