"""Closed-form sizes of models and their training state; no torch, no transformers."""

from eke.models.families import DECODERS, FAMILIES, VALID_TASKS
from eke.models.sizes.adapters import KEPT_WHOLE, Targets, choose_targets, is_ia3, linear_layers
from eke.models.sizes.flops import Flops, SampleMeans, training_flops
from eke.models.sizes.measure import adapted_layers, model_size, structure, training_structure
from eke.models.sizes.optimizer_descriptions import (
    DESCRIPTIONS,
    FLOAT32_BYTES,
    PAGED_MIN_SIZE,
    Description,
    algorithm,
    describe,
    is_quantised,
    optimizer_bytes,
    projection_rank,
)
from eke.models.sizes.parameters import ModelSize
from eke.models.sizes.predicted_positions import most_predicted, predicted_frac
from eke.models.sizes.sample_length import is_ragged
from eke.models.sizes.sharding import flat_pieces, pieces, shared_state_bytes, state_files
from eke.models.sizes.state import (
    BFLOAT16_BYTES,
    STAGE,
    StateBytes,
    has_master,
    state_bytes,
    weight_bytes,
)
from eke.models.sizes.structure import Attention, Role, Structure, Tokens, Weight
from eke.models.sizes.swapping import (
    PIECE_BUFFERS,
    WEIGHT_BUFFERS,
    SwapBytes,
    is_file,
    largest_part,
)

__all__ = [
    "BFLOAT16_BYTES",
    "DECODERS",
    "DESCRIPTIONS",
    "FAMILIES",
    "FLOAT32_BYTES",
    "KEPT_WHOLE",
    "PAGED_MIN_SIZE",
    "PIECE_BUFFERS",
    "STAGE",
    "VALID_TASKS",
    "WEIGHT_BUFFERS",
    "Attention",
    "Description",
    "Flops",
    "ModelSize",
    "Role",
    "SampleMeans",
    "StateBytes",
    "Structure",
    "SwapBytes",
    "Targets",
    "Tokens",
    "Weight",
    "adapted_layers",
    "algorithm",
    "choose_targets",
    "describe",
    "flat_pieces",
    "has_master",
    "is_file",
    "is_ia3",
    "is_quantised",
    "is_ragged",
    "largest_part",
    "linear_layers",
    "model_size",
    "most_predicted",
    "optimizer_bytes",
    "pieces",
    "predicted_frac",
    "projection_rank",
    "shared_state_bytes",
    "state_bytes",
    "state_files",
    "structure",
    "training_flops",
    "training_structure",
    "weight_bytes",
]
