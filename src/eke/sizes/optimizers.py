"""Bytes that each optimizer keeps for a parameter; no torch.

What a library's own code does, to the byte; scalar step counters are left out.
"""

from collections.abc import Callable, Iterable
from math import prod
from typing import cast

from eke.schema import (
    SGD,
    Adafactor,
    AdamW,
    AdamW8bit,
    AdamWTorchAO4bit,
    AdamWTorchAO8bit,
    Apollo,
    Config,
    GaLore,
    Lion,
    Lion8bit,
    Muon,
    Optimizer,
    ScheduleFree,
)
from eke.sizes.structure import Role, Weight

FLOAT32_BYTES = 4
"""Of states that are float32 whatever the weights are."""

QMAP_BYTES = 256 * FLOAT32_BYTES
"""Values that the codes of 8 bits stand for."""


def projection_rank(config: Config) -> int:
    """Rank of GaLore's and APOLLO's projections: what is asked for, else a quarter of the width.

    Source of the quarter: APOLLO's own default, arXiv:2412.05270, section 5.1.
    """
    rank = cast(GaLore | Apollo, config.optimizer).rank
    return rank or max(1, config.model.hidden_size // 4)


def optimizer_bytes(
    config: Config,
    weights: Iterable[Weight],
    bytes_of: Callable[[Weight], int] = lambda weight: FLOAT32_BYTES,
) -> int:
    """Bytes of an optimizer's state for these trained weights.

    Args:
        config: whose optimizer it is.
        weights: tensors that get a gradient.
        bytes_of: of one number of a weight; most optimizers keep states in the same format.
    """
    count = BYTES[type(config.optimizer)]
    trained = list(weights)
    own = sum(count(config, weight, bytes_of(weight)) for weight in trained)
    return own + _shared_bytes(config.optimizer, trained)


def is_quantised(optimizer: Optimizer, weight: Weight) -> bool:
    """Whether an optimizer that quantises does so for this weight."""
    num = prod(weight.shape)
    if isinstance(optimizer, AdamW8bit | Lion8bit):
        in_32_bits = optimizer.embeddings_32bit and weight.place is Role.embedding
        return num >= optimizer.min_8bit_size and not in_32_bits
    if isinstance(optimizer, AdamWTorchAO8bit | AdamWTorchAO4bit):
        return num >= TORCHAO_MIN_SIZE and num % optimizer.block_size == 0
    return False


TORCHAO_MIN_SIZE = 4096
"""torchao 0.18, optim/adam.py, _new_buffer."""

BITSANDBYTES_BLOCK = 256
"""bitsandbytes 0.50, optim/optimizer.py, init_state."""


def _shared_bytes(optimizer: Optimizer, weights: list[Weight]) -> int:
    """Bitsandbytes keeps one table of values per moment for all parameters."""
    if not any(is_quantised(optimizer, weight) for weight in weights):
        return 0
    moments = {AdamW8bit: 2, Lion8bit: 1}
    return moments.get(type(optimizer), 0) * QMAP_BYTES


def _adamw(config: Config, weight: Weight, weight_bytes: int) -> int:
    """Two moments as large as the parameter; Schedule-Free has one, and fast weights."""
    return 2 * weight_bytes * prod(weight.shape)


def _adamw_8bit(config: Config, weight: Weight, weight_bytes: int) -> int:
    return 2 * _bitsandbytes_moment(config.optimizer, weight)


def _lion(config: Config, weight: Weight, weight_bytes: int) -> int:
    return _bitsandbytes_moment(config.optimizer, weight)


def _bitsandbytes_moment(optimizer: Optimizer, weight: Weight) -> int:
    """A byte per number and a scale per block, or float32."""
    num = prod(weight.shape)
    if not is_quantised(optimizer, weight):
        return FLOAT32_BYTES * num
    return num + FLOAT32_BYTES * -(-num // BITSANDBYTES_BLOCK)


def _torchao(bits: int) -> Callable[[Config, Weight, int], int]:
    """Codes, a scale per block, and a table of values for each moment of each tensor."""

    def count(config: Config, weight: Weight, weight_bytes: int) -> int:
        num = prod(weight.shape)
        if not is_quantised(config.optimizer, weight):
            return 2 * weight_bytes * num
        block = cast(AdamWTorchAO8bit | AdamWTorchAO4bit, config.optimizer).block_size
        codes, scales = num * bits // 8, FLOAT32_BYTES * (num // block)
        return 2 * (codes + scales + FLOAT32_BYTES * (1 << bits))

    return count


def _adafactor(config: Config, weight: Weight, weight_bytes: int) -> int:
    """Rows and columns of a matrix, all of a vector, no first moment; float32 for any weights.

    Source: transformers.optimization.Adafactor (beta1=None); arXiv:1804.04235, section 4.
    """
    shape = weight.shape
    if len(shape) < 2:
        return FLOAT32_BYTES * prod(shape)
    return FLOAT32_BYTES * (prod(shape[:-1]) + prod(shape[:-2] + shape[-1:]))


def _sgd(config: Config, weight: Weight, weight_bytes: int) -> int:
    """The momentum buffer; torch makes none at momentum 0."""
    return weight_bytes * prod(weight.shape) if cast(SGD, config.optimizer).momentum else 0


def _muon(config: Config, weight: Weight, weight_bytes: int) -> int:
    """One momentum for a matrix inside a layer, AdamW's two moments elsewhere."""
    return (1 if weight.role is Role.hidden else 2) * weight_bytes * prod(weight.shape)


def _galore(config: Config, weight: Weight, weight_bytes: int) -> int:
    """A matrix has at most as many singular vectors as its shorter side is long."""
    rank = min(projection_rank(config), *weight.shape)
    return _low_rank(weight, rank, weight_bytes)


def _apollo(config: Config, weight: Weight, weight_bytes: int) -> int:
    """A random projection has its rank even where the matrix has less."""
    return _low_rank(weight, projection_rank(config), weight_bytes)


def _low_rank(weight: Weight, rank: int, weight_bytes: int) -> int:
    """Two moments of long side x rank, and a projection of rank x short side."""
    if weight.role is not Role.hidden:
        return 2 * weight_bytes * prod(weight.shape)
    return weight_bytes * rank * (2 * max(weight.shape) + min(weight.shape))


BYTES: dict[type[Optimizer], Callable[[Config, Weight, int], int]] = {
    AdamW: _adamw,
    AdamW8bit: _adamw_8bit,
    AdamWTorchAO8bit: _torchao(8),
    AdamWTorchAO4bit: _torchao(4),
    ScheduleFree: _adamw,
    Adafactor: _adafactor,
    SGD: _sgd,
    Lion: _lion,
    Lion8bit: _lion,
    Muon: _muon,
    GaLore: _galore,
    Apollo: _apollo,
}
"""Optimizer schema -> bytes it keeps for one weight, of so many bytes per number."""
