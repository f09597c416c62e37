"""Schema of fused kernels that replace parts of a model."""

from dataclasses import dataclass


@dataclass
class Kernels:
    """Fused kernels in place of a model's own operations."""

    option: str = "none"
    """The option chosen; set by the option's file."""
    fused_linear_cross_entropy: bool = False
    """Projects onto the vocabulary and takes the loss piece by piece: never all logits at once."""
    sparse_prediction: bool = False
    """Leaves positions without a label, which add nothing to the loss, out of the projection."""
