"""How many positions of a sample are projected onto the vocabulary."""

import math
from dataclasses import replace

from eke.config.schema import Config, MaskedLM
from eke.models.sizes.structure import Structure, Tokens, Weight

DEVIATIONS = 3
"""Standard deviations above the mean that some micro-batch of a run may well have: one in 740."""


def predicted_frac(config: Config, length: float | None = None) -> float:
    """Share of positions, on average; where only data can tell, all of them.

    Args:
        config: of the run.
        length: tokens of a row, which has one target at least; None takes `data.seq_len`.
    """
    if not config.kernels.sparse_prediction or not isinstance(config.task, MaskedLM):
        return 1.0
    share, tokens = config.task.mask_frac, length or config.data.seq_len
    return share + (1 - share) ** tokens / tokens


def most_predicted(config: Config, rows: int, length: int) -> int:
    """The most of so many rows' tokens that a run is likely to meet: each is chosen by chance."""
    positions, share = rows * length, predicted_frac(config, length)
    deviation = math.sqrt(positions * share * (1 - share))
    return min(positions, math.ceil(positions * share + DEVIATIONS * deviation))


def with_sparse_head(config: Config, structure: Structure) -> Structure:
    """The same tensors, of which the vocabulary's projection may see fewer positions."""
    if predicted_frac(config) == 1:
        return structure
    rows = config.model.vocab_size

    def sparse(weight: Weight) -> Weight:
        is_projection = weight.tokens is not Tokens.none and weight.shape[0] == rows
        return replace(weight, tokens=Tokens.predicted) if is_projection else weight

    return replace(structure, weights=tuple(map(sparse, structure.weights)))
