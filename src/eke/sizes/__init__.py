"""Closed-form sizes of models and their training state; no torch, no transformers."""

from eke.sizes.adapters import KEPT_WHOLE, Targets, choose_targets, is_ia3, linear_layers
from eke.sizes.families import DECODERS, FAMILIES, VALID_TASKS
from eke.sizes.flops import Flops, SampleMeans, training_flops
from eke.sizes.labels import most_predicted, predicted_frac
from eke.sizes.measure import (
    adapted_layers,
    model_size,
    structure,
    training_structure,
)
from eke.sizes.optimizers import (
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
from eke.sizes.rows import is_ragged
from eke.sizes.sharing import flat_pieces, pieces, shared_state_bytes, state_files
from eke.sizes.size import ModelSize
from eke.sizes.state import (
    BFLOAT16_BYTES,
    STAGE,
    StateBytes,
    has_master,
    state_bytes,
    weight_bytes,
)
from eke.sizes.structure import Attention, Role, Structure, Tokens, Weight
from eke.sizes.swapping import PIECE_BUFFERS, WEIGHT_BUFFERS, SwapBytes, is_file, largest_part

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
