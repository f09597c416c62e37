"""Schemas of the optimizers."""

from dataclasses import dataclass, field
from enum import Enum

from eke.config.schema.limits import above, at_least, below, between, inside

MAX_LR = 100
"""Above the largest learning rate in use, 30 (plain SGD of an LSTM, arXiv:1708.02182)."""
MAX_WEIGHT_DECAY = 100
"""Above every one in use: at a learning rate of 0.01 a step then sets the weights to 0."""
MAX_EPS = 1
"""The largest in use (Inception's, arXiv:1512.00567): above it, updates are gradients / eps."""


@dataclass
class Optimizer:
    """What every optimizer has."""

    option: str = "adamw"
    """The option chosen; set by the option's file."""
    lr: float = field(default=1e-3, metadata=above(0, MAX_LR))
    """Peak learning rate, before the schedule."""
    weight_decay: float = field(default=0.01, metadata=between(0, MAX_WEIGHT_DECAY))
    """Decoupled decay of matrices; biases and normalisation weights are never decayed."""


@dataclass
class AdamW(Optimizer):
    """AdamW and its implementations."""

    beta1: float = field(default=0.9, metadata=below(0, 1))
    """Decay of the first moment."""
    beta2: float = field(default=0.999, metadata=below(0, 1))
    """Decay of the second moment."""
    eps: float = field(default=1e-8, metadata=above(0, MAX_EPS))
    """Added to the denominator."""


@dataclass
class Adafactor(Optimizer):
    """transformers' Adafactor with a fixed learning rate (relative_step off)."""

    clip_threshold: float = field(default=1.0, metadata=above(0))
    """Limit of the root mean square of an update."""
    decay_rate: float = field(default=-0.8, metadata=between(-1, 0))
    """Exponent of the second moment's decay over steps (arXiv:1804.04235, section 7.2)."""
    eps1: float = field(default=1e-30, metadata=above(0))
    """Added to the squared gradient."""


@dataclass
class SGD(Optimizer):
    """Stochastic gradient descent."""

    momentum: float = field(default=0.9, metadata=between(0, 1))
    """0 keeps no state at all."""
    nesterov: bool = False
    """Nesterov momentum."""


@dataclass
class AdamW8bit(AdamW):
    """bitsandbytes' AdamW, its moments in 8 bits with a scale for each block of 256."""

    min_8bit_size: int = field(default=4096, metadata=at_least(0))
    """Tensors with fewer numbers keep 32-bit moments."""
    embeddings_32bit: bool = True
    """32-bit moments for embeddings, which 8 bits make unstable (arXiv:2110.02861, section 2.3)."""


@dataclass
class AdamWTorchAO8bit(AdamW):
    """torchao's AdamW with 8-bit moments, of tensors of 4096 numbers or more."""

    block_size: int = field(default=256, metadata=between(1, 4096))
    """Numbers that share a scale; a tensor that it does not divide keeps unquantised moments."""


@dataclass
class AdamWTorchAO4bit(AdamW):
    """torchao's AdamW with 4-bit moments, of tensors of 4096 numbers or more."""

    block_size: int = field(default=128, metadata=between(1, 4096))
    """Numbers that share a scale; a tensor that it does not divide keeps unquantised moments."""


@dataclass
class Lion(Optimizer):
    """Lion: the sign of an interpolated momentum (arXiv:2302.06675)."""

    beta1: float = field(default=0.9, metadata=below(0, 1))
    """Share of the momentum in the update."""
    beta2: float = field(default=0.99, metadata=below(0, 1))
    """Decay of the momentum."""


@dataclass
class Lion8bit(Lion):
    """bitsandbytes' Lion, its momentum in 8 bits with a scale for each block of 256."""

    min_8bit_size: int = field(default=4096, metadata=at_least(0))
    """Tensors with fewer numbers keep a 32-bit momentum."""
    embeddings_32bit: bool = True
    """A 32-bit momentum for embeddings."""


class AdjustLR(Enum):
    """How Muon's learning rate depends on a matrix' shape; torch's names."""

    original = "original"
    match_rms_adamw = "match_rms_adamw"


@dataclass
class Muon(AdamW):
    """torch's Muon for the matrices of Transformer layers, AdamW for everything else."""

    momentum: float = field(default=0.95, metadata=below(0, 1))
    """Decay of the momentum that is orthogonalised."""
    nesterov: bool = True
    """Nesterov momentum."""
    ns_steps: int = field(default=5, metadata=between(1, 99))
    """Newton-Schulz iterations."""
    adjust_lr: AdjustLR = AdjustLR.match_rms_adamw
    """match_rms_adamw makes updates as large as AdamW's, so that its learning rate and decay serve
    (arXiv:2502.16982, section 2.2); original is sqrt(max(1, rows / columns))."""
    adamw_lr: float | None = field(default=None, metadata=above(0, MAX_LR))
    """Peak learning rate of everything else; null takes `lr`."""


@dataclass
class ScheduleFree(AdamW):
    """Schedule-Free AdamW (arXiv:2405.15682): an average of weights in place of a schedule."""

    beta1: float = field(default=0.9, metadata=inside(0, 1))
    """Share of the average in the weights that gradients are taken at."""
    average_power: float = field(default=0.0, metadata=at_least(0))
    """Weights enter the average by this power of the step's number (r in the paper)."""
    lr_power: float = field(default=2.0, metadata=at_least(0))
    """Weights enter the average by this power of the largest learning rate so far."""


@dataclass
class GaLore(AdamW):
    """AdamW on gradients projected by their leading singular vectors (arXiv:2403.03507)."""

    rank: int | None = field(default=None, metadata=at_least(1))
    """Singular vectors kept of a matrix inside a layer; null takes a quarter of the width."""
    update_proj_gap: int = field(default=200, metadata=at_least(1))
    """Steps between two singular value decompositions."""
    scale: float = field(default=0.25, metadata=above(0))
    """Factor of projected updates."""


class ScaleType(Enum):
    """What shares one of APOLLO's scaling factors."""

    channel = "channel"
    tensor = "tensor"


@dataclass
class Apollo(AdamW):
    """SGD scaled as a randomly projected AdamW would scale it (arXiv:2412.05270)."""

    rank: int | None = field(default=None, metadata=at_least(1))
    """Rows of a matrix' random projection; null takes a quarter of the width."""
    update_proj_gap: int = field(default=200, metadata=at_least(1))
    """Steps between two random projections."""
    scale: float = field(default=1.0, metadata=above(0))
    """Updates are multiplied by its square root; APOLLO-Mini has 128 at rank 1."""
    scale_type: ScaleType = ScaleType.channel
    """tensor is APOLLO-Mini's."""


OPTIMIZERS: dict[str, type] = {
    "adamw": AdamW,
    "adamw_8bit": AdamW8bit,
    "adamw_torchao_8bit": AdamWTorchAO8bit,
    "adamw_torchao_4bit": AdamWTorchAO4bit,
    "adafactor": Adafactor,
    "apollo": Apollo,
    "galore": GaLore,
    "lion": Lion,
    "lion_8bit": Lion8bit,
    "muon": Muon,
    "schedule_free": ScheduleFree,
    "sgd": SGD,
}
"""Schema name -> class, for the options that do not have the fields of `Optimizer` alone."""
