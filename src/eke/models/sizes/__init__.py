"""Closed-form sizes of models and their training state; no torch, no transformers."""

from eke.models.sizes.optimizers import (
    OPTIMIZER_REGISTRY,
    PAGED_MIN_SIZE,
    OptimizerEntry,
    optimizer_bytes,
    optimizer_entry,
    projection_rank,
    quantises_state,
)
from eke.models.sizes.parameters import (
    ModelSize,
    SampleMeans,
    Targets,
    adapted_layers,
    choose_targets,
    is_ia3,
    is_ragged,
    linear_layers,
    model_size,
    most_predicted,
    passed_layers,
    predicted_frac,
    structure,
    training_flops,
    training_structure,
)
from eke.models.sizes.state import (
    BFLOAT16_BYTES,
    PIECE_BUFFERS,
    STAGE,
    WEIGHT_BUFFERS,
    StateBytes,
    SwapBytes,
    WeightFormats,
    decide_formats,
    flat_pieces,
    largest_part,
    pieces,
    shared_state_bytes,
    state_bytes,
    state_files,
)
