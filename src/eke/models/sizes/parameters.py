"""The size of a model: what follows from its configuration without building it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSize:
    """Counts for one model and one task head."""

    num_parameters: int
    """Of the model itself, shared ones counted once; adapters are none of it."""
    num_trained_parameters: int | None
    """That an optimizer changes: adapters, or all that an output depends on; None where only the
    built model can tell."""
    num_active_parameters: int
    """Without the experts that a token does not pass through; else as `num_parameters`."""
    num_matmul_parameters: int
    """Parameters that are multiplied with every token: no embeddings, norms or biases, no heads
    behind pooling; a tied output projection counts, and of experts those a token passes through."""
    flops_per_sample: float | None
    """Floating-point operations of one training step per sample, forward and backward,
    recomputation not counted (model FLOPs); None where they cannot be known."""
    flops_formula: str
    """How `flops_per_sample` was computed, in one line."""
    tokens_per_sample: float = 0.0
    """Of source and target, without padding: a mean where samples differ."""

    @property
    def flops_per_token(self) -> float | None:
        """`flops_per_sample` over the sample's tokens."""
        if self.flops_per_sample is None or not self.tokens_per_sample:
            return None
        return self.flops_per_sample / self.tokens_per_sample
