"""What a model is made of, as far as counting goes: its weights, and its attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Tokens(Enum):
    """Which positions of a sample a weight is multiplied with."""

    none = "none"
    """No matrix multiplication: embeddings that are only looked up, norms, biases."""
    source = "source"
    """Every token of the input (the encoder's, in T5)."""
    target = "target"
    """Every token of T5's decoder."""
    sample = "sample"
    """One vector per sample: heads that run behind pooling."""


@dataclass(frozen=True)
class Weight:
    """One parameter tensor."""

    shape: tuple[int, ...]
    tokens: Tokens = Tokens.none
    """A tied output projection is one weight, multiplied with the tokens it is applied to."""
    trained: bool = True
    """False for a tensor that no output depends on: it gets no gradient and no optimizer state."""


@dataclass(frozen=True)
class Attention:
    """The attention of one stack of layers."""

    num_layers: int
    width: int
    """Query heads x width of one head; the hidden size in most models."""
    queries: Tokens
    keys: Tokens
    causal: bool


@dataclass(frozen=True)
class Structure:
    """One model with its task head."""

    weights: tuple[Weight, ...]
    """Every trainable tensor, shared ones once."""
    attention: tuple[Attention, ...]


def linear(out: int, inp: int, tokens: Tokens, *, bias: bool) -> Iterator[Weight]:
    """A linear layer, weight as torch stores it: [out, in]."""
    yield Weight((out, inp), tokens)
    if bias:
        yield Weight((out,))


def layer_norm(width: int) -> Iterator[Weight]:
    """Scale and shift; RMSNorm is a lone `Weight((width,))`."""
    yield Weight((width,))
    yield Weight((width,))
