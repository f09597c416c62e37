"""Models of own code: parameters of known shape, activations known only by a trace."""

from math import prod
from typing import cast

from eke.config.schema import Config, CustomModel
from eke.models.families.family_record import (
    Family,
    Kernel,
    Role,
    Shape,
    Stack,
    Structure,
    Tokens,
    Weight,
)


def _structure(config: Config) -> Structure:
    """Return the tensors, as matrices whose use is unknown: they count as products of a token."""
    weights = []
    for shape in map(tuple, cast(CustomModel, config.model).shapes):
        if len(shape) < 2:
            weights.append(Weight(shape or (1,)))
        else:
            place = Role.hidden if len(shape) == 2 else Role.outer
            weights.append(Weight((shape[0], prod(shape[1:])), Tokens.source, place=place))
    return Structure(tuple(weights), ())


def _stacks(shape: Shape, kernel: Kernel) -> tuple[Stack, ...]:
    """Return no activations: a forecast without a trace is a lower bound."""
    return ()


CUSTOM = Family(
    name="custom",
    tasks=("custom", "causal_lm", "masked_lm", "seq2seq_lm", "sequence_classification"),
    structure=_structure,
    stacks=_stacks,
    outside=lambda shape, task: 0,
    counted_as="llama",
    is_known=False,
    probable_dropout=0.0,
)
