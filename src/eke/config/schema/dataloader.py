"""Schema of how batches reach the device."""

from dataclasses import dataclass, field

from eke.config.schema.limits import at_least, between
from eke.config.schema.switch import Switch


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
