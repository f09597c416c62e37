"""Memory of the training state: what stays allocated between steps, to the byte."""

from dataclasses import dataclass, replace
from math import prod
from typing import cast

from eke.config.schema import FSDP, Config, Exchange, QLora, Switch, Weights
from eke.models.sizes.measure import training_structure
from eke.models.sizes.optimizer_descriptions import FLOAT32_BYTES, optimizer_bytes
from eke.models.sizes.structure import Weight

BFLOAT16_BYTES = 2

STAGE = {"zero1": 1, "zero2": 2, "zero3": 3}
"""Options of the group `distributed` by which DeepSpeed shares out the state."""

BLOCK, SCALES_PER_BLOCK = 64, 256
"""Weights per scale, and scales per scale of scales: arXiv:2305.14314, section 3."""

CODE_BYTES, SCALE_CODE_BYTES = 16 * FLOAT32_BYTES, 256 * FLOAT32_BYTES
"""The values that 4 and 8 bits stand for, kept with each tensor."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one process, without activations; of the first one, which has the largest parts."""

    weights: int
    gradients: int
    """All of them; the largest one where the optimizer steps in the backward pass."""
    optimizer: int
    """Moments; scalar step counters are left out."""
    master: int = 0
    """Float32 copies of narrower weights, for the optimizer to step on."""
    start: int = 0
    """All weights: what a process holds before it has only its part of them."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.master

    @property
    def peak(self) -> int:
        """The most of them at any time."""
        return max(self.start, self.total)


def weight_bytes(config: Config) -> int:
    """Bytes of one of the model's own numbers, and of its gradient."""
    narrow = config.precision.weights is Weights.bfloat16
    return BFLOAT16_BYTES if narrow else FLOAT32_BYTES


def has_master(config: Config) -> bool:
    """Whether the optimizer steps on float32 copies: where asked for and of use, and in ZeRO."""
    wanted = config.precision.master is Switch.on or config.distributed.option in STAGE
    return config.precision.weights is Weights.bfloat16 and wanted


def state_bytes(config: Config) -> StateBytes:
    """Exact bytes of weights, gradients and optimizer state after the first step.

    Raises:
        ConfigError: if the family has no head for the task.
    """
    whole = training_structure(config).weights
    weights = whole
    if isinstance(config.distributed, FSDP):
        weights = tuple(replace(weight, shape=_part(config, weight.shape)) for weight in whole)
    trained = [weight for weight in weights if weight.trained]
    gradients = [w for w in whole if w.trained] if _adds_up_whole(config) else trained
    master = has_master(config)
    at_once = max if config.memory.optimizer_in_backward else sum
    return StateBytes(
        weights=sum(_stored_bytes(config, weight) for weight in weights),
        gradients=at_once(_number_bytes(config, w) * prod(w.shape) for w in gradients),
        optimizer=optimizer_bytes(
            config, trained, lambda w: FLOAT32_BYTES if master else _number_bytes(config, w)
        ),
        master=FLOAT32_BYTES * sum(prod(w.shape) for w in trained) if master else 0,
        start=sum(_stored_bytes(config, weight) for weight in whole),
    )


def _part(config: Config, shape: tuple[int, ...]) -> tuple[int, ...]:
    """What the first process of FSDP2 holds of a tensor: it cuts the first dimension, rounding up.

    Source: torch's Shard placement, as `torch.chunk` cuts.
    """
    if not shape:
        return shape
    return (-(-shape[0] // config.distributed.num_processes), *shape[1:])


def _adds_up_whole(config: Config) -> bool:
    """Whether gradients of several micro-batches add up before they are shared out."""
    sharing, batch = config.distributed, config.batch
    per_round = batch.micro_batch * sharing.num_processes
    accumulation = batch.target // per_round if batch.target else batch.accumulation or 1
    return isinstance(sharing, FSDP) and sharing.exchange is Exchange.last and accumulation > 1


def _number_bytes(config: Config, weight: Weight) -> int:
    """Adapters stay float32 beside narrower weights: peft's default."""
    return FLOAT32_BYTES if weight.is_adapter else weight_bytes(config)


def _stored_bytes(config: Config, weight: Weight) -> int:
    numbers = prod(weight.shape)
    if not weight.four_bits:
        return _number_bytes(config, weight) * numbers
    return four_bit_bytes(numbers, cast(QLora, config.peft).double_quant)


def four_bit_bytes(numbers: int, double_quant: bool) -> int:
    """Bytes of one tensor as bitsandbytes 0.50 keeps it: two numbers in a byte, and the scales.

    Source: bitsandbytes.functional.quantize_4bit and QuantState; arXiv:2305.14314, section 3.
    """
    blocks = -(-numbers // BLOCK)
    packed = -(-numbers // 2) + CODE_BYTES
    if not double_quant:
        return packed + FLOAT32_BYTES * blocks
    return packed + blocks + FLOAT32_BYTES * -(-blocks // SCALES_PER_BLOCK) + SCALE_CODE_BYTES
