"""Memory of the training state: what stays allocated between steps, to the byte."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import cast

from eke.schema import SGD, Config, Optimizer
from eke.schema import Adafactor as AdafactorConfig
from eke.schema import AdamW as AdamWConfig
from eke.sizes.measure import structure
from eke.sizes.size import ModelSize

FLOAT32_BYTES = 4
"""Weights, gradients and optimizer state are float32 in every precision eke has."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one process, without activations."""

    weights: int
    gradients: int
    optimizer: int
    """Moments; scalar step counters are left out."""

    @property
    def total(self) -> int:
        """All three."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(config: Config, size: ModelSize) -> StateBytes:
    """Exact bytes of weights, gradients and optimizer state after the first step.

    Raises:
        ConfigError: if the family has no head for the task.
    """
    trained = [weight.shape for weight in structure(config).weights if weight.trained]
    count = NUMBERS[type(config.optimizer)]
    return StateBytes(
        weights=FLOAT32_BYTES * size.num_parameters,
        gradients=FLOAT32_BYTES * sum(prod(shape) for shape in trained),
        optimizer=FLOAT32_BYTES * sum(count(config.optimizer, shape) for shape in trained),
    )


def _adamw(optimizer: Optimizer, shape: Shape) -> int:
    """Two moments as large as the parameter."""
    return 2 * prod(shape)


def _adafactor(optimizer: Optimizer, shape: Shape) -> int:
    """Rows and columns of a matrix, all of a vector, no first moment.

    Source: transformers.optimization.Adafactor (beta1=None); arXiv:1804.04235, section 4.
    """
    if len(shape) < 2:
        return prod(shape)
    return prod(shape[:-1]) + prod(shape[:-2] + shape[-1:])


def _sgd(optimizer: Optimizer, shape: Shape) -> int:
    """The momentum buffer; torch makes none at momentum 0."""
    return prod(shape) if cast(SGD, optimizer).momentum else 0


NUMBERS: dict[type[Optimizer], Callable[[Optimizer, Shape], int]] = {
    AdamWConfig: _adamw,
    AdafactorConfig: _adafactor,
    SGD: _sgd,
}
"""Optimizer schema -> numbers it keeps for a parameter of one shape."""
