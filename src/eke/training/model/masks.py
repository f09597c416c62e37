"""What eke knows about its batches, so that transformers need not look at the device to find out.

transformers decides from values on the device whether a row holds several packed sequences, and
whether it ends in padding: one wait for the GPU each, in every forward pass; and when it may not
look (under torch.compile) it builds a full mask, which PyTorch's flash kernel does not take. eke
knows from its configuration: rows hold one sequence each, or they are packed and their positions
restart at each; and what a causal model must not see comes after what it computes. For the packages
of FlashAttention transformers asks once more, in every layer, wherever a batch has one row.
"""

import functools
from typing import Any

import torch


def spare_mask_checks(model: torch.nn.Module, packed: bool = False) -> None:
    """Answer both questions beforehand, for this process; call before the first forward pass.

    Seen with transformers 5.17 and 5.23. In a version without these names nothing is replaced, and
    the count of reads in tests/unit/training/loop/test_no_sync.py tells.

    Args:
        model: whose modules may warn.
        packed: rows hold several sequences, whose `position_ids` restart at 0.
    """
    from transformers import masking_utils
    from transformers import modeling_flash_attention_utils as flash

    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = (
            sequence_numbers if packed else _one_sequence_per_row
        )
    if hasattr(flash, "_is_packed_sequence"):
        look = _transformers_own_look()
        vars(flash)["_is_packed_sequence"] = look if packed else _is_not_packed
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            # Past nn.Module's own __setattr__, which is for parameters and submodules.
            vars(module)["warn_if_padding_and_no_attention_mask"] = _nothing_to_warn_about


def sequence_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """Number of the sequence each token belongs to, without a look at any value.

    Args:
        position_ids: (rows, length); 0 wherever a sequence begins, and at each padding token.

    Returns:
        (rows, length), rising by one at each beginning.
    """
    return (position_ids == 0).cumsum(-1)


@functools.cache
def _transformers_own_look() -> Any:
    """As it was before anything replaced it."""
    from transformers import modeling_flash_attention_utils as flash

    return flash._is_packed_sequence


def _is_not_packed(*_: Any) -> bool:
    """One sequence in each row."""
    return False


def _one_sequence_per_row(position_ids: torch.Tensor) -> None:
    """No packed sequences."""


def _nothing_to_warn_about(*_: Any, **__: Any) -> None:
    """Padding is masked wherever it could be attended to."""
