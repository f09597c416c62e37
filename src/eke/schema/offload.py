"""Schema of what lives outside the device's memory."""

from dataclasses import dataclass


@dataclass
class Offload:
    """Which parts of the training state wait in host memory or on a disk."""

    option: str = "none"
    """The option chosen; set by the option's file."""
