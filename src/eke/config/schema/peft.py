"""Schemas of parameter-efficient fine-tuning."""

from dataclasses import dataclass, field
from enum import Enum

from eke.config.schema.limits import above, at_least, below


class TrainedBias(Enum):
    """Which biases are trained beside the adapters."""

    none = "none"
    lora_only = "lora_only"


class FourBits(Enum):
    """The sixteen values that a 4-bit weight may have, before its block's scale."""

    nf4 = "nf4"
    fp4 = "fp4"


@dataclass
class Peft:
    """Which parameters are trained: all, or a few added ones."""

    option: str = "none"
    """The option chosen; set by the option's file."""


@dataclass
class Adapters(Peft):
    """Added parameters; the model's own are frozen, but for the head a classification task adds."""

    target_modules: list[str] | None = None
    """Linear layers that are adapted, by the end of their names: [q_proj,v_proj]. null is every
    one in a Transformer layer (ia3: keys, values and the feed-forward's last)."""
    save_merged: bool = False
    """Write the model with its adapters merged into the weights, too, when training ends."""


@dataclass
class Lora(Adapters):
    """Low-rank updates W + (alpha / r) B A of linear layers' weights; B starts at zero."""

    r: int = field(default=16, metadata=at_least(1))
    """Rank: rows of A, columns of B."""
    alpha: float = field(default=32.0, metadata=above(0))
    """Scale of the update, over r (over the square root of r with use_rslora)."""
    dropout: float = field(default=0.0, metadata=below(0, 1))
    """Of the adapters' input, while training."""
    bias: TrainedBias = TrainedBias.none
    """Train the biases of the adapted layers, too."""
    use_rslora: bool = False
    """Divide alpha by the square root of r instead of by r (arXiv:2312.03732)."""


@dataclass
class QLora(Lora):
    """LoRA over weights that are kept in 4 bits."""

    quant_type: FourBits = FourBits.nf4
    """nf4 has the quantiles of a normal distribution, fp4 a sign, exponents and a mantissa bit."""
    double_quant: bool = True
    """Keep the blocks' scales in 8 bits."""


PEFTS: dict[str, type] = {"none": Peft, "lora": Lora, "qlora": QLora, "ia3": Adapters}
"""Schema name -> class."""
