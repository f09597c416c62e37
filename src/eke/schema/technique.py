"""Schemas of the techniques: what changes speed or memory, and nothing else."""

from dataclasses import dataclass, field
from enum import Enum

from eke.schema.limits import above, at_least, below, between


class Compute(Enum):
    """Number format of matrix multiplications and attention."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Switch(Enum):
    """Leave it to the plan, or force it."""

    auto = "auto"
    on = "on"
    off = "off"


class Checkpointing(Enum):
    """Which activations are recomputed in the backward pass instead of being kept."""

    off = "off"
    full = "full"


@dataclass
class Precision:
    """Number formats of one training step."""

    option: str = "fp32"
    """The option chosen; set by the option's file."""
    compute: Compute = Compute.float32
    """Autocast format of the forward pass; weights, optimizer state and reductions stay float32."""
    tf32: Switch = Switch.auto
    """TF32 for the float32 matrix multiplications that remain; auto is PyTorch's default, off."""


@dataclass
class Optimizer:
    """What every optimizer has."""

    option: str = "adamw"
    """The option chosen; set by the option's file."""
    lr: float = field(default=1e-3, metadata=above(0))
    """Peak learning rate, before the schedule."""
    weight_decay: float = field(default=0.01, metadata=at_least(0))
    """Decoupled decay of matrices; biases and normalisation weights are never decayed."""


@dataclass
class AdamW(Optimizer):
    """AdamW and its implementations."""

    beta1: float = field(default=0.9, metadata=below(0, 1))
    """Decay of the first moment."""
    beta2: float = field(default=0.999, metadata=below(0, 1))
    """Decay of the second moment."""
    eps: float = field(default=1e-8, metadata=above(0))
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
class Schedule:
    """Learning rate over steps."""

    option: str = "cosine"
    """The option chosen; set by the option's file."""
    warmup_steps: int | None = field(default=None, metadata=at_least(0))
    """Linear warm-up in steps; null takes `warmup_frac` of the run."""
    warmup_frac: float = field(default=0.05, metadata=between(0, 1))
    """Linear warm-up as a share of the run."""


@dataclass
class DecayingSchedule(Schedule):
    """A schedule that ends below its peak."""

    final_frac: float = field(default=0.0, metadata=between(0, 1))
    """Learning rate at the end, as a share of the peak."""


@dataclass
class WSDSchedule(DecayingSchedule):
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395)."""

    decay_frac: float = field(default=0.2, metadata=between(0, 1))
    """Share of the run spent on the final linear decay."""


@dataclass
class Memory:
    """Techniques against activation memory."""

    option: str = "none"
    """The option chosen; set by the option's file."""
    checkpointing: Checkpointing = Checkpointing.off
    """full recomputes every layer in the backward pass."""


@dataclass
class Attention:
    """Attention implementation."""

    option: str = "sdpa"
    """The option chosen; set by the option's file."""


@dataclass
class Compile:
    """torch.compile."""

    option: str = "none"
    """The option chosen; set by the option's file."""


@dataclass
class Distributed:
    """How many processes train one model, and how they share it."""

    option: str = "none"
    """The option chosen; set by the option's file."""
    num_processes: int = field(default=1, metadata=at_least(1))
    """Processes, one per device: the only place that says how many GPUs a run takes."""


@dataclass
class DataLoader:
    """How batches reach the device."""

    option: str = "none"
    """The option chosen; set by the option's file."""
    workers: int = field(default=0, metadata=between(0, 256))
    """Loader processes; 0 collates in the training process."""
    pin_memory: Switch = Switch.auto
    """Page-locked host memory; auto turns it on for CUDA."""
    prefetch: int | None = field(default=None, metadata=at_least(1))
    """Batches each loader process prepares ahead; null is PyTorch's 2."""
    persistent: bool = False
    """Keep evaluation's loader processes between evaluations (training's live all the run)."""


@dataclass
class Engine:
    """Which training loop runs the plan."""

    option: str = "loop"
    """The option chosen; set by the option's file."""
