"""The size of a model: what follows from its configuration without building it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSize:
    """Counts for one model and one task head."""

    num_parameters: int
    """Trainable parameters, shared ones counted once."""
    num_matmul_parameters: int
    """Parameters that are multiplied with every token: no embeddings, norms or biases, no heads
    behind pooling; a tied output projection counts."""
    flops_per_sample: float
    """Floating-point operations of one training step per sample, forward and backward,
    recomputation not counted (model FLOPs)."""
    flops_formula: str
    """How `flops_per_sample` was computed, in one line."""
