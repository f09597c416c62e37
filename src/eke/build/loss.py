"""The loss of one micro-batch, for every task alike.

transformers' own losses are not used: some ignore `num_items_in_batch`, so that gradient
accumulation and data parallelism change them (DESIGN section 6).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eke.build.batches import MicroBatch
from eke.build.fused_head import fuse_head
from eke.plan import Plan
from eke.sizes.families import is_classification
from eke.tokens import IGNORED

LossFunction = Callable[[nn.Module, MicroBatch], Tensor]
"""Model and micro-batch -> the loss summed over the micro-batch's targets, a float32 scalar."""


def build_loss(plan: Plan) -> LossFunction:
    """How the plan gets from a micro-batch to its loss."""
    return from_fused_head if has_fused_loss(plan) else from_logits


def has_fused_loss(plan: Plan) -> bool:
    """Whether the vocabulary projection and the loss are one operation."""
    return plan.config.kernels.fused_linear_cross_entropy and not is_classification(plan.config)


def fuse_loss(plan: Plan, model: nn.Module) -> None:
    """Prepare the model for what `build_loss` gives; before anything wraps it.

    Raises:
        RunError: the model's head cannot be fused.
    """
    if has_fused_loss(plan):
        fuse_head(model)


def from_fused_head(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The model's fused head answers with the loss itself."""
    loss: Tensor = model(**batch.inputs, labels=batch.labels).logits
    return loss


def from_logits(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Cross-entropy of all logits at once."""
    return loss_sum(model(**batch.inputs).logits, batch.labels)


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
