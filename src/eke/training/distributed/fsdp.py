"""FSDP2: sharded training state, gathered for checkpoints and split on load.

`fully_shard` turns parameters into DTensors, cut along their first dimension. A checkpoint looks
as if one process had written it; each process reads all of it and cuts its part.
Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from eke.config.schema import FSDP
from eke.plan.planner import Plan
from eke.training.model.checkpointing import find_layers


@dataclass(frozen=True)
class WholeState:
    """Weights and optimizer state as one process would have them, in host memory."""

    weights: dict[str, Tensor]
    """Under the names of the model's `state_dict`."""
    optimizer: dict[str, Any]
    """The optimizer's `state_dict`."""
    training: list[Tensor] = field(default_factory=list)
    """What the optimizer trains, in the order of its groups, where `weights` are an average."""


def build_mesh(plan: Plan, device: torch.device) -> Any:
    """The ranks that share out a model, along "shard"."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (plan.batch.world_size,), mesh_dim_names=("shard",))


def shard_model(plan: Plan, model: nn.Module, mesh: Any) -> None:
    """Cut the parameters of `model`, on the meta device or equal on each process, in place.

    Each Transformer layer is gathered alone; what lies around them (embeddings, heads) is one more
    unit, kept from forward to backward.
    """
    from torch.distributed.fsdp import fully_shard

    config = plan.config.distributed
    assert isinstance(config, FSDP)
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


def cut_like(tensor: Tensor, place: Tensor) -> Tensor:
    """This process's part of a whole tensor, where `place` is cut; nothing is sent."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(place, DTensor):
        return tensor
    mesh = place.device_mesh
    moved = tensor.to(place.device)
    return distribute_tensor(moved, mesh, place.placements, src_data_rank=None)


def gather_weights(model: nn.Module, keep: bool, frozen: bool = True) -> dict[str, Tensor]:
    """Weights and buffers (trained ones alone, unless `frozen`) by name if `keep`, on the host.

    Every process must call it. One tensor at a time is put together; tied ones stay one tensor.
    """
    once: dict[int, Tensor] = {}
    names: dict[str, Tensor] = {}
    # A hook of FSDP2 first cuts again what an evaluation has left whole.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not frozen and not tensor.requires_grad:
            continue
        if id(tensor) not in once:
            gathered = whole(tensor.detach())
            once[id(tensor)] = gathered.cpu() if keep else tensor
        names[name] = once[id(tensor)]
    return names if keep else {}


def gather_parameters(optimizer: torch.optim.Optimizer, keep: bool) -> list[Tensor]:
    """What the optimizer steps on, whole, in host memory if `keep`; every process must call it."""
    gathered = (whole(p.detach()) for group in optimizer.param_groups for p in group["params"])
    return [tensor.cpu() for tensor in gathered if keep]


def gather_optimizer(optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Any]:
    """`optimizer.state_dict()` with whole tensors on the host if `keep`; a collective."""

    def gather(value: Tensor) -> Tensor | None:
        gathered = whole(value)
        return gathered.cpu() if keep else None

    content: dict[str, Any] = tree_map_only(Tensor, gather, optimizer.state_dict())
    return content if keep else {}


def cut_optimizer(content: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A `state_dict` of whole tensors; those as large as their parameter are cut as that is."""
    places = [p for group in optimizer.param_groups for p in group["params"]]

    def cut(value: Any, place: Tensor) -> Any:
        same = isinstance(value, Tensor) and value.shape == place.shape
        return cut_like(value, place) if same else value

    state = {
        number: {name: cut(value, places[number]) for name, value in values.items()}
        for number, values in content["state"].items()
    }
    return {**content, "state": state}
