"""The loss of one micro-batch, for every task alike.

transformers' own losses are not used: some ignore `num_items_in_batch`, so that gradient
accumulation and data parallelism change them (docs/design/loss.md).
"""

from collections.abc import Callable

from torch import Tensor, nn

from eke.models.families import is_classification
from eke.plan.planner import Plan
from eke.training.batches.batches import MicroBatch
from eke.training.model import cross_entropy
from eke.training.model.loss_head import put_loss_head

LossFunction = Callable[..., Tensor]
"""Model and micro-batch -> the loss summed over the micro-batch's targets, a float32 scalar;
and as `smoothing` the share of each target that is spread over all classes."""


def build_loss(plan: Plan) -> LossFunction:
    """How the plan gets from a micro-batch to its loss."""
    return from_loss_head if has_loss_head(plan) else from_logits


def has_loss_head(plan: Plan) -> bool:
    """Whether the vocabulary projection takes the loss itself."""
    return has_fused_loss(plan) or is_sparse(plan)


def has_fused_loss(plan: Plan) -> bool:
    """Whether the vocabulary projection and the loss are one operation."""
    return plan.config.kernels.fused_linear_cross_entropy and not is_classification(plan.config)


def is_sparse(plan: Plan) -> bool:
    """Whether positions without a label are left out of the vocabulary projection."""
    return plan.config.kernels.sparse_prediction and not is_classification(plan.config)


def apply_loss(plan: Plan, model: nn.Module) -> None:
    """Prepare the model for what `build_loss` gives; before anything wraps it.

    Raises:
        RunError: the model's head cannot be replaced.
    """
    if has_loss_head(plan):
        put_loss_head(model, has_fused_loss(plan))


def from_loss_head(model: nn.Module, batch: MicroBatch, smoothing: float = 0.0) -> Tensor:
    """The model's head answers with the loss itself."""
    expected: dict[str, Tensor | float | None] = {"labels": batch.labels, "places": batch.places}
    if smoothing:
        expected["smoothing"] = smoothing
    loss: Tensor = model(**batch.inputs, **expected).logits
    return loss


def from_logits(model: nn.Module, batch: MicroBatch, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of all logits at once."""
    return cross_entropy.loss_sum(model(**batch.inputs).logits, batch.labels, smoothing)
