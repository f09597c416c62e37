"""What each optimizer keeps for a parameter, and the products of its update; no torch.

By schema: options that have the same fields have the same algorithm, by another implementation.
What a library's own code does, to the byte; scalar step counters are left out.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import cast

from eke.config.schema import (
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
from eke.models.sizes.structure import Role, Weight

FLOAT32_BYTES = 4
"""Of states that are float32 whatever the weights are."""

QMAP_BYTES = 256 * FLOAT32_BYTES
"""Values that the codes of 8 bits stand for."""


@dataclass(frozen=True)
class Algorithm:
    """What follows from the fields of an optimizer alone."""

    count_bytes: Callable[[Config, Weight, int], int]
    """Bytes kept for one weight, of so many bytes per number."""
    quantises: Callable[[Optimizer, Weight], bool] | None = None
    """Whether it does so for this weight; None where it never does."""
    num_tables: int = 0
    """Tables of the values of 8 bits that all weights share."""
    projects: bool = False
    """Its states of a matrix inside a layer lie in a subspace, of `projection_rank`."""
    keeps_singular_vectors: bool = False
    """All of a projected matrix, of which its projection is a slice."""
    count_flops: Callable[[Config, int, int], float] | None = None
    """Of the matrix multiplications in an update of a matrix inside a layer, rows <= columns."""


def algorithm(optimizer: Optimizer) -> Algorithm:
    """Of a configured optimizer."""
    return ALGORITHMS[type(optimizer)]


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
    kept, trained = algorithm(config.optimizer), list(weights)
    own = sum(kept.count_bytes(config, weight, bytes_of(weight)) for weight in trained)
    shared = any(is_quantised(config.optimizer, weight) for weight in trained)
    return own + shared * kept.num_tables * QMAP_BYTES


def paged_bytes(config: Config, weights: Iterable[Weight]) -> int:
    """Bytes of an optimizer's state in paged memory: moments, without the scales of their blocks.

    The driver moves pages between a GPU's memory and the host's; PyTorch reserves none for them.

    Args:
        config: whose optimizer it is; it pages (`Description.pages`).
        weights: tensors that get a gradient.
    """
    paged = [weight for weight in weights if prod(weight.shape) >= PAGED_MIN_SIZE]
    widths = (1 if is_quantised(config.optimizer, w) else FLOAT32_BYTES for w in paged)
    return sum(2 * width * prod(w.shape) for width, w in zip(widths, paged, strict=True))


PAGED_MIN_SIZE = 100_000
"""Numbers of a parameter from which on its states are paged (bitsandbytes, get_state_buffer)."""


def is_quantised(optimizer: Optimizer, weight: Weight) -> bool:
    """Whether an optimizer that quantises does so for this weight."""
    quantises = algorithm(optimizer).quantises
    return quantises is not None and quantises(optimizer, weight)


def _quantised_by_bitsandbytes(optimizer: Optimizer, weight: Weight) -> bool:
    fields = cast(AdamW8bit | Lion8bit, optimizer)
    in_32_bits = fields.embeddings_32bit and weight.place is Role.embedding
    return prod(weight.shape) >= fields.min_8bit_size and not in_32_bits


def _quantised_by_torchao(optimizer: Optimizer, weight: Weight) -> bool:
    num, block = prod(weight.shape), cast(AdamWTorchAO8bit | AdamWTorchAO4bit, optimizer).block_size
    return num >= TORCHAO_MIN_SIZE and num % block == 0


TORCHAO_MIN_SIZE = 4096
"""torchao 0.18, optim/adam.py, _new_buffer."""

BITSANDBYTES_BLOCK = 256
"""bitsandbytes 0.50, optim/optimizer.py, init_state."""


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


def _newton_schulz(config: Config, rows: int, columns: int) -> float:
    """In each iteration X X^T, its square, and their sum times X.

    Source: torch.optim.Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon).
    """
    iterations = cast(Muon, config.optimizer).ns_steps
    return iterations * (4.0 * rows * rows * columns + 2.0 * rows**3)


def _into_the_subspace(config: Config, rows: int, columns: int) -> float:
    return 2.0 * projection_rank(config) * rows * columns


def _there_and_back(config: Config, rows: int, columns: int) -> float:
    return 2 * _into_the_subspace(config, rows, columns)


ALGORITHMS: dict[type[Optimizer], Algorithm] = {
    AdamW: Algorithm(_adamw),
    AdamW8bit: Algorithm(_adamw_8bit, _quantised_by_bitsandbytes, num_tables=2),
    AdamWTorchAO8bit: Algorithm(_torchao(8), _quantised_by_torchao),
    AdamWTorchAO4bit: Algorithm(_torchao(4), _quantised_by_torchao),
    ScheduleFree: Algorithm(_adamw),
    Adafactor: Algorithm(_adafactor),
    SGD: Algorithm(_sgd),
    Lion: Algorithm(_lion),
    Lion8bit: Algorithm(_lion, _quantised_by_bitsandbytes, num_tables=1),
    Muon: Algorithm(_muon, count_flops=_newton_schulz),
    GaLore: Algorithm(
        _galore, projects=True, keeps_singular_vectors=True, count_flops=_there_and_back
    ),
    Apollo: Algorithm(_apollo, projects=True, count_flops=_into_the_subspace),
}
"""Schema of the optimizer -> its algorithm."""
