"""What is known of each optimizer, in one place: others ask for a fact, not for a name."""

from eke.sizes.optimizers.algorithms import (
    FLOAT32_BYTES,
    PAGED_MIN_SIZE,
    Algorithm,
    algorithm,
    is_quantised,
    optimizer_bytes,
    paged_bytes,
    projection_rank,
)
from eke.sizes.optimizers.description import AUTO, Description
from eke.sizes.optimizers.table import DESCRIPTIONS, PIECES, describe
from eke.sizes.optimizers.temporaries import LOOPS, Step

__all__ = [
    "AUTO",
    "DESCRIPTIONS",
    "FLOAT32_BYTES",
    "LOOPS",
    "PAGED_MIN_SIZE",
    "PIECES",
    "Algorithm",
    "Description",
    "Step",
    "algorithm",
    "describe",
    "is_quantised",
    "optimizer_bytes",
    "paged_bytes",
    "projection_rank",
]
