"""FSDP2: training state in DTensors, sharded along their first dimension.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from eke.config.schema import FSDP
from eke.plan.planner import Plan
from eke.training.model.checkpointing import find_layers


def build_mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    """Return the mesh of ranks: "shard" divides a tensor, "replicate" copies its shards."""
    replicas = cast(FSDP, plan.ranks.fsdp).replicas
    skipped = replicas == 1  # a dimension of one rank would have process groups of its own
    shape = (replicas, plan.batch.world_size // replicas)[skipped:]
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[skipped:])


def shard_model(plan: Plan, model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the parameters of `model`, without data or equal on all ranks, in place.

    Units are each Transformer layer, embedding and head unless they share weights, and the rest.
    """
    from eke.training.model.number_formats import kept_wide

    sent = getattr(torch, plan.compute.gathered) if plan.compute.gathered else None
    # Modules cast their inputs as in one process.
    policy = MixedPrecisionPolicy(sent, torch.float32 if sent else None, cast_forward_inputs=False)
    again = cast(FSDP, plan.ranks.fsdp).reshard_after_forward
    scalars = set(replicated(model))
    layers, table, head = find_layers(model), _untied(model, "input"), _untied(model, "output")
    units: list[Any] = [unit for unit in (table, *layers, head) if unit is not None]
    for unit in [*units, model]:
        # The backward pass needs the head's weights first: resharding them would save no memory.
        back = again if unit in layers else unit is table
        how: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": back, "mp_policy": policy}
        fully_shard(unit, **how, ignored_params=scalars)
        if unit in (head, model):  # not resharded above: their evaluation has no backward pass
            unit.register_forward_hook(_free_gathered)
        if plan.device.kind == "cpu":
            unit.set_custom_reduce_scatter(_InPlace())
            unit._set_unshard_async_op(True)  # else each buffer is kept until the next is full
    wide = kept_wide(plan, model) if sent else set()
    for group in groups_of(model.modules()) if sent else ():
        _set_formats(group.fsdp_params, wide)
    if isinstance(table, nn.Embedding):
        units[0].set_unshard_in_backward(False)  # its backward pass does not read the weight
    for unit, following in pairwise(units):
        if plan.device.kind != "cpu":
            unit.set_modules_to_forward_prefetch([following])
        else:  # FSDP2 reads an empty list as its default
            following.set_modules_to_backward_prefetch([following])


def replicated(model: nn.Module) -> list[nn.Parameter]:
    """Return scalar parameters, which FSDP2 does not support. Each rank holds them."""
    return [p for p in model.parameters() if not p.dim()]


def _free_gathered(unit: Any, *_: Any) -> None:
    """Free the gathered weights of a unit after a forward pass without a backward pass."""
    if not unit.training:
        unit.reshard()


class _InPlace(DefaultReduceScatter):
    """Sum gradients over ranks without the copy that gloo's reduce-scatter makes (torch 2.13)."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, *_: Any, **__: Any
    ) -> Any:
        dist.all_reduce(input_tensor, op, group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def _untied(model: Any, side: str) -> nn.Module | None:
    """Return the module of input or output embeddings if no other module shares its weights."""
    with suppress(AttributeError, NotImplementedError):  # classes without embeddings
        found: Any = getattr(model, f"get_{side}_embeddings")()
        owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
        return found if all(owners[id(p)] == 1 for p in found.parameters()) else None
    return None


class _Wide(FSDPParam):
    """Weight that is gathered in its own format instead of the unit's (torch 2.13)."""

    def init_dtype_attrs(self, mp_policy: Any) -> None:
        super().init_dtype_attrs(replace(mp_policy, param_dtype=None))


class _Exact(FSDPParam):
    """Weight that is gathered in 16 bits and has a float32 gradient."""

    def init_unsharded_param(self) -> None:
        super().init_unsharded_param()  # type: ignore[no-untyped-call]  # torch 2.13
        if self._unsharded_param.requires_grad:
            self._unsharded_param.grad_dtype = torch.float32


def _set_formats(weights: Sequence[FSDPParam], wide: Set[Tensor]) -> None:
    """Keep formats that differ from the unit's, whose gradients FSDP2 reduces as one tensor."""
    trained = {w.sharded_param in wide for w in weights if w.sharded_param.requires_grad}
    for weight in weights:
        fused = getattr(weight._module_info.module, "fused", False)  # has a float32 gradient
        if weight.sharded_param in wide:
            weight.__class__ = _Wide
        elif fused or len(trained) > 1:
            weight.__class__ = _Exact


def groups_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Return FSDP2's communication groups of those modules that are units with own weights."""
    found = (m._get_fsdp_state()._fsdp_param_group for m in modules if isinstance(m, FSDPModule))
    return [group for group in found if group is not None]


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor. Collective: every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor, or the tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the local shards of tensors."""
    return sum(local_tensor(tensor).nbytes for tensor in tensors)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this process holds only a shard of a tensor."""
    return local_tensor(tensor).numel() < tensor.numel()
