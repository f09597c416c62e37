"""The vocabulary projection and the cross-entropy as one operation, which never has all logits.

The projection of a language model is replaced by a module with the same tensors that, given labels,
answers with the loss. It happens inside the model's forward pass, so that whatever wraps the model
(data parallelism, sharding, compilation) sees one forward pass as ever.

Source: `torch.nn.functional.linear_cross_entropy`, torch 2.13.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eke.errors import RunError
from eke.tokens import IGNORED


class FusedHead(nn.Module):
    """A linear layer that answers with the summed loss once it was handed labels."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.labels: Tensor | None = None
        """Of the forward pass under way; shape (...), IGNORED where nothing is to be predicted."""

    def forward(self, hidden: Tensor) -> Tensor:
        """The loss summed over the labels, a float32 scalar; without labels, the logits.

        Args:
            hidden: (..., width of the model).
        """
        if self.labels is None:
            return F.linear(hidden, self.weight, self.bias)
        labels, self.labels = self.labels, None
        return fused_loss_sum(hidden, self.weight, self.bias, labels)


def fused_loss_sum(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """What `eke.build.loss.loss_sum` makes of the logits, without the logits.

    In 16 bits PyTorch returns the sum in 16 bits, too, where float16 ends at 65504, and computes
    the gradients before any loss scaling (seen with torch 2.13). There the losses are taken one by
    one, each rounded to 16 bits, and summed here in float32, which costs the projection a second
    time in the backward pass.

    Args:
        hidden: (..., width).
        weight: (vocabulary, width).
        bias: (vocabulary,) or None.
        labels: (...), IGNORED where nothing is to be predicted.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        # The operation is unknown to autocast, which would cast the operands of a linear layer.
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    exact = hidden.dtype is torch.float32
    losses = F.linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        linear_bias=bias,
        reduction="sum" if exact else "none",
        ignore_index=IGNORED,
        # The compiler cannot follow gradients that are used up in place; PyTorch would say so.
        options=nn.LinearCrossEntropyOptions(allow_retain_graph=torch.compiler.is_compiling()),
    )
    return losses.to(torch.float32).sum()


def fuse_head(model: nn.Module) -> None:
    """Let `model(labels=...)` answer with the summed loss in place of the logits.

    Raises:
        RunError: the model has no plain vocabulary projection.
    """
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    if type(head) is not nn.Linear:
        found = "none" if head is None else type(head).__name__
        raise RunError(
            f"kernels.fused_linear_cross_entropy = true: {type(model).__name__} has no linear "
            f"projection onto a vocabulary (found: {found})\n"
            "  -> kernels.fused_linear_cross_entropy=false"
        )
    fused = FusedHead(head)
    name = next(name for name, module in model.named_modules() if module is head)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, fused)

    def hand_over_labels(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        fused.labels = kwargs.pop("labels", None)
        return args, kwargs

    model.register_forward_pre_hook(hand_over_labels, with_kwargs=True)
