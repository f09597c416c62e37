"""Model families: one record each, with closed forms for sizes, FLOPs and activations."""

from eke.models.families.family_record import (
    FLOAT32_BYTES,
    AttentionLayers,
    Family,
    Kernel,
    Layer,
    Role,
    Shape,
    Stack,
    Structure,
    Tokens,
    Weight,
    head_width,
    is_classification,
    num_labels,
)
from eke.models.families.registry import FAMILIES, family_of

__all__ = [
    "FAMILIES",
    "FLOAT32_BYTES",
    "AttentionLayers",
    "Family",
    "Kernel",
    "Layer",
    "Role",
    "Shape",
    "Stack",
    "Structure",
    "Tokens",
    "Weight",
    "family_of",
    "head_width",
    "is_classification",
    "num_labels",
]
