"""Schema of number formats."""

from dataclasses import dataclass
from enum import Enum

from eke.config.schema.switch import Switch


class Compute(Enum):
    """Number format of matrix multiplications and attention."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Weights(Enum):
    """Number format of weights and gradients."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Float8(Enum):
    """How the operands of linear layers are scaled into float8's narrow range."""

    off = "off"
    tensorwise = "tensorwise"
    """One scale per tensor."""
    rowwise = "rowwise"
    """One scale per row or column: closer, and slower."""


class Evaluation(Enum):
    """Number format of matrix multiplications in evaluation."""

    same = "same"
    """That of training."""
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass
class Precision:
    """Number formats of one training step."""

    option: str = "fp32"
    """The option chosen; set by the option's file."""
    compute: Compute = Compute.float32
    """Format of the forward pass: autocast over float32 weights, or simply that of the weights."""
    weights: Weights = Weights.float32
    """Format of weights and gradients, and of the states of optimizers that follow it."""
    master: Switch = Switch.auto
    """Float32 copies of bfloat16 weights, for the optimizer to step on; auto is off."""
    float8: Float8 = Float8.off
    """Products inside linear layers in float8, all but the first and last layer's (torchao)."""
    tf32: Switch = Switch.auto
    """TF32 for the float32 matrix multiplications that remain; auto is PyTorch's default, off."""
    evaluation: Evaluation = Evaluation.same
    """Autocast format in evaluation; the weights stay as training needs them."""
