"""Schema of attention."""

from dataclasses import dataclass
from enum import Enum


class Backend(Enum):
    """Kernel of PyTorch's scaled dot-product attention."""

    auto = "auto"
    flash = "flash"
    mem_efficient = "mem_efficient"
    cudnn = "cudnn"
    math = "math"


AUTO_ATTENTION = "auto"
"""Option that stands for sdpa, or eager where the model's class has no other."""


@dataclass
class Attention:
    """Attention implementation."""

    option: str = "sdpa"
    """The option chosen; set by the option's file."""
    backend: Backend = Backend.auto
    """The one kernel sdpa may use (mem_efficient is xFormers'); auto leaves it to PyTorch."""
