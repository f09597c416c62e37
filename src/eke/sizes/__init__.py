"""Closed-form sizes of models and their training state; no torch, no transformers."""

from eke.sizes.families import FAMILIES, VALID_TASKS
from eke.sizes.flops import Flops, training_flops
from eke.sizes.measure import model_size, parameter_shapes, structure
from eke.sizes.size import ModelSize
from eke.sizes.state import FLOAT32_BYTES, StateBytes, state_bytes
from eke.sizes.structure import Attention, Structure, Tokens, Weight

__all__ = [
    "FAMILIES",
    "FLOAT32_BYTES",
    "VALID_TASKS",
    "Attention",
    "Flops",
    "ModelSize",
    "StateBytes",
    "Structure",
    "Tokens",
    "Weight",
    "model_size",
    "parameter_shapes",
    "state_bytes",
    "structure",
    "training_flops",
]
