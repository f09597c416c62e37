"""What is known of each optimizer, in one place: others ask for a fact, not for a name."""

from eke.models.sizes.algorithms import (
    FLOAT32_BYTES,
    PAGED_MIN_SIZE,
    Algorithm,
    algorithm,
    is_quantised,
    optimizer_bytes,
    paged_bytes,
    projection_rank,
)
from eke.models.sizes.description import AUTO, Description
from eke.models.sizes.optimizer_temporaries import LOOPS, Step
from eke.models.sizes.table import DESCRIPTIONS, PIECES, describe

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
