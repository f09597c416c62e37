"""Memory of the training state where DeepSpeed shares it out or moves it off the device.

Formulas follow what deepspeed 0.19.8 allocates: the optimizer works on flat float32 pieces, copies
of the weights cut evenly between processes (arXiv:1910.02054). Gradients have the weights' format.
"""

from dataclasses import replace
from math import prod

from eke.config.schema import Config, NvmeOffload, WeightsPlace
from eke.models.sizes.measure import training_structure
from eke.models.sizes.optimizer_descriptions import (
    FLOAT32_BYTES,
    describe,
    optimizer_bytes,
    paged_bytes,
)
from eke.models.sizes.parameters import ModelSize
from eke.models.sizes.state import STAGE, StateBytes, state_bytes, weight_bytes
from eke.models.sizes.structure import Role, Weight
from eke.models.sizes.swapping import SwapBytes, swap_bytes

ALIGNMENT = 2
"""Numbers a flat piece is a multiple of in ZeRO-1 and 2: `nccl_start_alignment_factor`."""


def trained_weights(config: Config) -> list[Weight]:
    """Tensors that get a gradient."""
    return [weight for weight in training_structure(config).weights if weight.trained]


def pieces(config: Config) -> dict[Role, int]:
    """Numbers in each of one process's flat pieces: its share of a parameter group, and padding.

    ZeRO-1 and 2 pad each parameter group, one per role, ZeRO-3 each weight.
    """
    processes = config.distributed.num_processes
    trained = trained_weights(config)
    found = {}
    for role in Role:
        mine = [prod(weight.shape) for weight in trained if weight.role is role]
        if STAGE[config.distributed.option] == 3:
            numbers = sum(-(-number // processes) for number in mine)
        else:
            numbers = -(-sum(mine) // (ALIGNMENT * processes)) * ALIGNMENT
        if numbers:
            found[role] = numbers
    return found


def piece_numbers(config: Config) -> int:
    """Numbers in one process's flat pieces: its share of the trained weights, and the padding."""
    return sum(pieces(config).values())


def flat_pieces(config: Config) -> list[Weight]:
    """The pieces as the optimizer sees them: flat, and float32.

    `optimizer.embeddings_32bit` finds those of embeddings under ZeRO-3 alone, which puts a piece in
    the place that the group's first weight had: bitsandbytes 0.50 goes by that place.
    """
    knows = STAGE[config.distributed.option] == 3
    return [
        Weight((numbers,), place=role if knows else Role.hidden)
        for role, numbers in pieces(config).items()
    ]


def shared_state_bytes(config: Config, size: ModelSize, host: bool = False) -> StateBytes:
    """Bytes of one process on its device; everything where nothing is shared or moved.

    ZeRO-3's small weights, which stay whole, are left out: a lower bound, by 10 x hidden size
    numbers a weight at most.

    Args:
        config: as planned.
        size: of the model.
        host: count what waits in host memory, too: a CPU's device memory is just that.
    """
    whole = state_bytes(config)
    if host:  # where models are built before they are cut, moved or rounded to 4 bits
        whole = replace(whole, start=max(whole.start, weight_bytes(config) * size.num_parameters))
    pages = describe(config.optimizer).pages and not host
    if config.distributed.option not in STAGE:
        paged = paged_bytes(config, trained_weights(config)) if pages else 0
        return replace(whole, optimizer=whole.optimizer - paged)
    stage, offload = STAGE[config.distributed.option], config.offload.option
    processes = config.distributed.num_processes
    numbers = piece_numbers(config)
    trained = sum(prod(w.shape) for w in trained_weights(config)) or 1
    optimizer = FLOAT32_BYTES * numbers + optimizer_bytes(config, flat_pieces(config))
    optimizer -= paged_bytes(config, flat_pieces(config)) if pages else 0
    gradients = whole.gradients if stage == 1 else whole.gradients * numbers // trained
    weights = whole.weights if stage < 3 else -(-whole.weights // processes)
    if host and (files := state_files(config)):
        optimizer = files.optimizer_memory
        weights = files.weight_memory or weights
    return StateBytes(
        weights=0 if weights_leave(config) and not host else weights,
        gradients=0 if offload != "none" and stage > 1 and not host else gradients,
        optimizer=0 if offload != "none" and not host else optimizer,
    )


def weights_leave(config: Config) -> bool:
    """Whether the weights wait outside the device's memory."""
    offload = config.offload
    if isinstance(offload, NvmeOffload):
        return offload.weights is not WeightsPlace.device
    return offload.option == "params_cpu"


def state_files(config: Config) -> SwapBytes | None:
    """What one process has on the disk; None where nothing is to be there."""
    if not isinstance(config.offload, NvmeOffload) or config.distributed.option != "zero3":
        return None
    whole = state_bytes(config)
    return swap_bytes(config, num_moments=whole.optimizer // (whole.gradients or 1))
