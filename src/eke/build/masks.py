"""What eke knows about its batches, so that transformers need not look at the device to find out.

transformers decides from values on the device whether a row holds several packed sequences, and
whether it ends in padding: one wait for the GPU each, in every forward pass; and when it may not
look (under torch.compile) it builds a full mask, which PyTorch's flash kernel does not take. eke's
rows hold one sequence each, and what a causal model must not see comes after what it computes.
"""

from typing import Any

import torch


def spare_mask_checks(model: torch.nn.Module) -> None:
    """Answer both questions beforehand, for this process; call before the first forward pass.

    Seen with transformers 5.17 and 5.23. In a version without these names nothing is replaced, and
    the count of reads in tests/unit/run/test_no_sync.py tells.
    """
    from transformers import masking_utils

    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = _one_sequence_per_row
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            # Past nn.Module's own __setattr__, which is for parameters and submodules.
            vars(module)["warn_if_padding_and_no_attention_mask"] = _nothing_to_warn_about


def _one_sequence_per_row(position_ids: torch.Tensor) -> None:
    """No packed sequences."""


def _nothing_to_warn_about(*_: Any, **__: Any) -> None:
    """Padding is masked wherever it could be attended to."""
