"""Cross-entropy summed over the labels that count, in float32: of logits, or without them.

Divided by the number of targets of the whole global batch a sum is that batch's mean, however the
batch was cut.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eke.common.tokens import IGNORED


def loss_sum(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Of all logits at once.

    Args:
        logits: (..., classes), any floating format.
        labels: (...), IGNORED where nothing is to be predicted.
        smoothing: share of each target that is spread over all classes.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(
        flat.to(torch.float32),
        labels.reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=smoothing,
    )


def fused_loss_sum(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """What `loss_sum` makes of the logits, without the logits.

    In 16 bits PyTorch returns the sum in 16 bits, too, where float16 ends at 65504, and computes
    the gradients before any loss scaling (seen with torch 2.13). There the losses are taken one by
    one, each rounded to 16 bits, and summed here in float32, which costs the projection a second
    time in the backward pass.

    Source: `torch.nn.functional.linear_cross_entropy`, torch 2.13.

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
