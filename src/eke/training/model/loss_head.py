"""A vocabulary projection that, given labels, answers with the loss and leaves out what it can.

The projection of a language model is replaced by a module with the same tensors. It takes the loss
inside the model's forward pass, so that whatever wraps the model (data parallelism, sharding,
compilation) sees one forward pass as ever. It may leave out the positions without a label, which
add nothing to the loss (`sparse_prediction` in transformers' ModernBERT), and it may be one
operation with the loss, which never has all logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eke.common.errors import RunError
from eke.training.model import cross_entropy


@dataclass(frozen=True)
class Expected:
    """What a forward pass is to predict."""

    labels: Tensor
    """(...), IGNORED where nothing is to be predicted."""
    places: Tensor | None
    """Of the labels that count, in the flattened labels: (targets,); None projects everything."""
    smoothing: float
    """Share of each target that is spread over the vocabulary."""


class LossHead(nn.Module):
    """A linear layer that answers with the summed loss once it was handed labels.

    Args:
        linear: the projection; its tensors become this module's.
        fused: the projection and the loss are one operation.
    """

    def __init__(self, linear: nn.Linear, fused: bool) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.fused = fused
        self.expected: Expected | None = None
        """Of the forward pass under way."""
        self.projected: tuple[int, int] | None = None
        """Positions that the last pass with labels projected, and all there were; not compiled."""

    def forward(self, hidden: Tensor) -> Tensor:
        """The loss summed over the labels, a float32 scalar; without labels, the logits.

        Args:
            hidden: (..., width of the model).
        """
        if self.expected is None:
            return F.linear(hidden, self.weight, self.bias)
        labels, places = self.expected.labels.reshape(-1), self.expected.places
        smoothing = self.expected.smoothing
        self.expected = None
        vectors = hidden.reshape(-1, hidden.shape[-1])
        if places is not None:
            vectors, labels = vectors.index_select(0, places), labels.index_select(0, places)
        if not torch.compiler.is_compiling():
            self.projected = len(vectors), hidden.shape[:-1].numel()
        if self.fused and not smoothing:  # with smoothing torch 2.13 makes all logits, too
            return cross_entropy.fused_loss_sum(vectors, self.weight, self.bias, labels)
        return cross_entropy.loss_sum(F.linear(vectors, self.weight, self.bias), labels, smoothing)


def put_loss_head(model: nn.Module, fused: bool) -> None:
    """Let `model(labels=..., places=...)` answer with the summed loss in place of the logits.

    Args:
        model: with a vocabulary projection.
        fused: the projection and the loss are one operation.

    Raises:
        RunError: the model has no plain vocabulary projection.
    """
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    linear = find_head()
    if type(linear) is not nn.Linear:
        key = "fused_linear_cross_entropy" if fused else "sparse_prediction"
        found = "none" if linear is None else type(linear).__name__
        raise RunError(
            f"kernels.{key} = true: {type(model).__name__} has no linear "
            f"projection onto a vocabulary (found: {found})\n"
            f"  -> kernels.{key}=false"
        )
    head = LossHead(linear, fused)
    name = next(name for name, module in model.named_modules() if module is linear)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, head)

    def hand_over(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        labels, places = kwargs.pop("labels", None), kwargs.pop("places", None)
        smoothing = kwargs.pop("smoothing", 0.0)
        head.expected = None if labels is None else Expected(labels, places, smoothing)
        return args, kwargs

    model.register_forward_pre_hook(hand_over, with_kwargs=True)


def loss_head(model: nn.Module) -> LossHead | None:
    """The one that was put into a model."""
    return next((module for module in model.modules() if isinstance(module, LossHead)), None)
