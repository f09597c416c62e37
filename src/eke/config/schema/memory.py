"""Schema of the techniques against the memory of activations and gradients."""

from dataclasses import dataclass, field
from enum import Enum

from eke.config.schema.limits import at_least


class Checkpointing(Enum):
    """Which activations are recomputed in the backward pass instead of being kept."""

    off = "off"
    full = "full"
    selective = "selective"


@dataclass
class Memory:
    """Techniques against the memory of activations and gradients."""

    option: str = "none"
    """The option chosen; set by the option's file."""
    checkpointing: Checkpointing = Checkpointing.off
    """full recomputes layers in the backward pass; selective does, too, but keeps what their
    matrix multiplications and fused attention gave."""
    every_n: int = field(default=1, metadata=at_least(1))
    """Recompute the first of every n layers, and keep the activations of the others."""
    activation_offload: bool = False
    """Keep activations in host memory between forward and backward pass."""
    empty_cache_every: int | None = field(default=None, metadata=at_least(1))
    """Steps between two in which unused blocks of the allocator go back to the GPU's driver;
    null: never."""
    optimizer_in_backward: bool = False
    """Update each weight as soon as its gradient is there, and free the gradient."""
