"""Schema of torch.compile."""

from dataclasses import dataclass
from enum import Enum


class CompileMode(Enum):
    """What inductor takes its time for."""

    default = "default"
    reduce_overhead = "reduce_overhead"
    max_autotune = "max_autotune"
    max_autotune_no_cudagraphs = "max_autotune_no_cudagraphs"


GRAPH_MODES = (CompileMode.reduce_overhead, CompileMode.max_autotune)
"""Modes that replay CUDA graphs on a GPU."""


@dataclass
class Compile:
    """torch.compile."""

    option: str = "none"
    """The option chosen; set by the option's file."""
    mode: CompileMode = CompileMode.default
    """Of inductor: reduce_overhead replays CUDA graphs; max_autotune does, too, and times several
    kernels for each matrix multiplication."""
    regional: bool = False
    """Compile one Transformer layer, for all layers alike, instead of the whole model: a fraction
    of the compile time, and nothing is fused across layers."""

    @property
    def replays_graphs(self) -> bool:
        """Whether CUDA graphs are replayed on a GPU."""
        by_mode = self.option == "inductor" and self.mode in GRAPH_MODES
        return self.option == "cudagraphs" or by_mode
