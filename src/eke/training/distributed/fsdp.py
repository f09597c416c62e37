"""FSDP2: sharded training state.

`fully_shard` turns parameters into DTensors, cut along their first dimension.
Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from eke.config.schema import FSDP
from eke.plan.planner import Plan
from eke.training.model.checkpointing import find_layers


def shard_model(plan: Plan, model: nn.Module, device: torch.device) -> None:
    """Cut the parameters of `model`, equal on each process and on its device, in place.

    Each Transformer layer is gathered alone; what lies around them (embeddings, heads) is one more
    unit, kept from forward to backward.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    config = plan.config.distributed
    assert isinstance(config, FSDP)
    mesh = init_device_mesh(device.type, (plan.batch.world_size,))
    for layer in find_layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=config.reshard_after_forward)
    # Its weights are needed first in the backward pass: freeing them in between saves nothing.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def whole(tensor: Tensor) -> Tensor:
    """The tensor put together from its parts, or itself where it has none; all ranks must ask."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: all of it, where it is not cut."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of what this process holds of them."""
    return sum(part(tensor).nbytes for tensor in tensors)


def is_cut(tensor: Tensor) -> bool:
    """Whether this process holds less than all of it."""
    return part(tensor).numel() < tensor.numel()
