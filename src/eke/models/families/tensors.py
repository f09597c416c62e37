"""Tensors of a model: parameters, attention, and the tokens they are multiplied with."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import prod

FLOAT32_BYTES = 4

INDEX_BYTES = 8
"""Of a token's id, and of a label."""


class Tokens(Enum):
    """Which positions of a sample a weight is multiplied with."""

    none = "none"
    """No matrix multiplication: embeddings that are only looked up, norms, biases."""
    source = "source"
    """Every token of the input (the encoder's, in T5)."""
    target = "target"
    """Every token of T5's decoder."""
    predicted = "predicted"
    """Positions with a label, where the projection onto the vocabulary leaves out the others."""
    sample = "sample"
    """One vector per sample: heads that run behind pooling."""


class Role(Enum):
    """What a parameter is to an optimizer that does not treat all of them alike."""

    hidden = "hidden"
    """A matrix inside a Transformer layer."""
    embedding = "embedding"
    """A table of vectors, tied output projections included."""
    outer = "outer"
    """Any other tensor of two or more dimensions: heads, poolers, stacked experts."""
    vector = "vector"
    """Biases, normalisation weights, and what else has one row or one column: IA3's scales."""


@dataclass(frozen=True)
class Weight:
    """One parameter tensor."""

    shape: tuple[int, ...]
    tokens: Tokens = Tokens.none
    """A tied output projection is one weight, multiplied with the tokens it is applied to."""
    trained: bool = True
    """False for a tensor that no output depends on: it gets no gradient and no optimizer state."""
    active: tuple[int, int] = (1, 1)
    """Of a mixture of experts: how many of how many experts a token passes through."""
    place: Role = Role.hidden
    """Where it is, as far as its shape does not say it."""
    module: str = ""
    """Of a linear layer inside a Transformer layer, weight or bias: its name from that layer on."""
    is_head: bool = False
    """Of the head that a classification task adds."""
    is_adapter: bool = False
    """Added by parameter-efficient fine-tuning."""
    is_scale: bool = False
    """IA3's: of two dimensions, but a factor of each activation."""
    four_bits: bool = False
    """Kept as 4-bit numbers, a scale to each block of them."""

    @cached_property
    def role(self) -> Role:
        """What it is to an optimizer; the build side reads the same from a module."""
        if len(self.shape) < 2 or self.is_scale:
            return Role.vector
        stacked = len(self.shape) > 2
        return Role.outer if stacked and self.place is Role.hidden else self.place

    @cached_property
    def num_active(self) -> int:
        """Numbers that one token is multiplied with, where it is multiplied at all."""
        chosen, of = self.active
        return prod(self.shape) * chosen // of


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


def linear(
    out: int,
    inp: int,
    tokens: Tokens,
    *,
    bias: bool,
    place: Role = Role.hidden,
    module: str = "",
    is_head: bool = False,
) -> Iterator[Weight]:
    """A linear layer, weight as torch stores it: [out, in]."""
    yield Weight((out, inp), tokens, place=place, module=module, is_head=is_head)
    if bias:
        yield Weight((out,), module=module, is_head=is_head)


def table(rows: int, width: int, tokens: Tokens = Tokens.none) -> Weight:
    """An embedding; it is multiplied with `tokens` where it is the output projection, too."""
    return Weight((rows, width), tokens, place=Role.embedding)


def head(
    out: int, inp: int, tokens: Tokens, *, bias: bool, is_head: bool = False
) -> Iterator[Weight]:
    """A linear layer behind the last Transformer layer."""
    return linear(out, inp, tokens, bias=bias, place=Role.outer, is_head=is_head)


def layer_norm(width: int) -> Iterator[Weight]:
    """Scale and shift; RMSNorm is a lone `Weight((width,))`."""
    yield Weight((width,))
    yield Weight((width,))
