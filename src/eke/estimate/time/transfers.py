"""What leaves a device in one optimizer step: to the host, to a disk, to other devices.

Exchanged bytes are those of ring algorithms (Rajbhandari et al. 2019, arXiv:1910.02054, section 7):
of n processes each sends (n - 1) / n of what is gathered or reduced and scattered, and twice that
where all have the sum in the end.
"""

from dataclasses import dataclass

from eke.config.schema import FSDP, Exchange, NvmeOffload, PeerToPeer, WeightsPlace
from eke.estimate.memory.activations import activations
from eke.estimate.memory.shape import Shape
from eke.estimate.time.products import Contents
from eke.models.sizes import FLOAT32_BYTES, STAGE, training_structure
from eke.plan.planner import Plan

STATE_READS = 2 * 12
"""Bytes per number that an update from a disk reads and writes: float32 weight and two moments."""


@dataclass(frozen=True)
class Moves:
    """Of one process in one optimizer step."""

    to_host: float = 0.0
    """Bytes over PCI Express, both ways together."""
    on_host: float = 0.0
    """Numbers that the host's processor updates."""
    to_disk: float = 0.0
    """Bytes, read and written."""
    exchanged: float = 0.0
    """Bytes sent to other devices."""
    collectives: int = 0
    """Exchanges that are started."""
    notes: tuple[str, ...] = ()


def moves(plan: Plan, contents: Contents, shape: Shape) -> Moves:
    """Transfers and exchanges of one optimizer step.

    Args:
        plan: of the run.
        contents: of the model.
        shape: of one micro-batch, with rows as long as they are.
    """
    sent, count, notes = _exchanged(plan, contents)
    to_host, on_host, to_disk = _offloaded(plan, contents)
    if plan.config.memory.activation_offload and plan.device.kind != "cpu":
        parts = tuple(training_structure(plan.config).weights)
        each = activations(plan, shape, parts).offloaded
        to_host += 2.0 * each * plan.batch.accumulation
    return Moves(to_host, on_host, to_disk, sent, count, notes)


def updated_here(plan: Plan, contents: Contents) -> float:
    """Trained numbers that a process updates on its device."""
    if plan.config.offload.option != "none":
        return 0.0
    return contents.trained / _shares(plan)


def _shares(plan: Plan) -> int:
    """Processes that the optimizer's work is shared out to."""
    config = plan.config
    if config.distributed.option in STAGE or isinstance(config.distributed, FSDP):
        return max(1, plan.batch.world_size)
    return 1


def _offloaded(plan: Plan, contents: Contents) -> tuple[float, float, float]:
    """Bytes to and from the host, numbers updated there, bytes to and from a disk."""
    config = plan.config
    if config.offload.option == "none" or plan.device.kind == "cpu":
        return 0.0, 0.0, 0.0
    numbers = contents.trained / _shares(plan)
    width = FLOAT32_BYTES if plan.compute.weights == "float32" else 2
    moved = 2 * width * numbers  # gradients there, weights back
    disk = 0.0
    leaves = config.offload.option == "params_cpu"
    if isinstance(config.offload, NvmeOffload):
        disk = STATE_READS * numbers
        leaves = config.offload.weights is not WeightsPlace.device
    if leaves:  # each process brings its part in for every pass
        moved += 2 * plan.batch.accumulation * width * contents.numbers / _shares(plan)
    return moved, numbers, disk


def _exchanged(plan: Plan, contents: Contents) -> tuple[float, int, tuple[str, ...]]:
    """Bytes sent, exchanges started, and what is not known of them."""
    config, rounds = plan.config, plan.batch.accumulation
    option = config.distributed.option
    count = max(plan.batch.world_size, plan.batch.devices)
    if count < 2:
        return 0.0, 0, ()
    part = (count - 1) / count
    width = FLOAT32_BYTES if plan.compute.weights == "float32" else 2
    weights, gradients = width * contents.numbers, width * contents.trained
    layers = max(1, config.model.num_hidden_layers)
    if option == "dp":
        # The first device sends all weights and gathers all gradients, in every micro-batch.
        note = "distributed=dp: one Python process feeds all devices, one after the other"
        return (count - 1) * rounds * (weights + gradients), 2 * rounds * layers, (note,)
    if option == "zero3":
        narrow = 2 * contents.numbers if plan.compute.autocast else weights
        return part * rounds * (2 * narrow + gradients), 3 * rounds * layers, ()
    if isinstance(config.distributed, FSDP):
        gathers = rounds * (2 if config.distributed.reshard_after_forward else 1)
        sums = rounds if config.distributed.exchange is Exchange.every else 1
        sent = part * (gathers * weights + sums * gradients)
        return sent, (gathers + sums) * layers, ()
    reduced = rounds if option == "zero2" else 1
    return part * (reduced * gradients + weights_back(option, weights, gradients)), 25, ()


def weights_back(option: str, weights: float, gradients: float) -> float:
    """Second half of an exchange: updated weights in ZeRO, sums of gradients in DDP."""
    return weights if option in STAGE else gradients


def goes_through_host(plan: Plan) -> bool:
    """Whether GPUs exchange through host memory though they have links of their own."""
    return plan.config.distributed.p2p is PeerToPeer.off
