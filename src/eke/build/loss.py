"""The loss, from logits, for every task alike.

transformers' own losses are not used: some ignore `num_items_in_batch`, so that gradient
accumulation and data parallelism change them (DESIGN section 6).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from eke.tokens import IGNORED


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy summed over the labels that count, in float32.

    Divided by the number of targets of the whole global batch it is that batch's mean, however the
    batch was cut.

    Args:
        logits: (..., classes), any floating format.
        labels: (...), IGNORED where nothing is to be predicted.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(
        flat.to(torch.float32), labels.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )
