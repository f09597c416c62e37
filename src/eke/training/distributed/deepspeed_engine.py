"""DeepSpeed engine, its optimizer step and checkpoint parts, and the choice of model sharding."""

import importlib
import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from eke.common.paths import LOCAL_RANK
from eke.config.schema import GradientSync
from eke.models.sizes import exchange_of
from eke.plan.planner import Plan
from eke.training.distributed.build_operators import Engine, in_memory, prepare_swap, swap_buffers
from eke.training.distributed.fsdp import (
    build_mesh,
    full_tensor,
    part_bytes,
    replicated,
    shard_model,
)
from eke.training.distributed.parts import Parts
from eke.training.distributed.ranks import Ranks
from eke.training.loop.meter import LossScale
from eke.training.model.number_formats import Formats
from eke.training.optimizer.update import PlainUpdate, Update
from eke.training.part_files import Held, Piece
from eke.training.state_parts import Stepped, hold, hold_state, named_weights, row_piece


def build_engine(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    formats: Formats,
    device: torch.device,
    swap: Path | None = None,
    parts: Parts | None = None,
) -> Engine:
    """Build the engine with the plan's sharding. `swap` is the folder for state in files.

    Ranks must have built equal models on `device`, for ZeRO-3 on the host or, with several ranks,
    in `parts`. The optimizer receives DeepSpeed's flat shards as its parameters.
    """
    deepspeed = import_deepspeed(device)
    settings = plan.deepspeed
    assert settings is not None, "no plan for DeepSpeed"
    if swap is not None:
        settings = prepare_swap(settings, swap)
    if not dist.is_initialized():  # several ranks already have a group
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store: Any = dist.HashStore()  # type: ignore[attr-defined]  # torch 2.13: not exported
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    # deepspeed 0.19.8 would compile C++ for a minute at the first start on a machine (its
    # ShareMemComm), for communication through shared memory in inference on CPUs.
    communication: Any = importlib.import_module("deepspeed.comm.torch")
    communication.build_shm_op = lambda: None
    deepspeed.init_distributed(auto_mpi_discovery=False)  # uses the existing group
    _compute_under_autocast(model, formats)
    if plan.ranks.zero_stage == 3:
        with parts.sharded_flat(deepspeed.zero.Init) if parts else nullcontext():
            deepspeed.zero.Init(module=model, config_dict_or_path=settings)
        for buffer in model.buffers():  # Init moves only parameters
            buffer.data = buffer.data.to(device)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )
    if plan.ranks.zero_stage == 3 and not plan.config.offload.is_on:
        # It should step on the float32 weights themselves, but deepspeed 0.19.8 copies them:
        # stage3.py, `_create_fp32_partitions`, compares their device with its name, which is never
        # equal.
        weights = engine.optimizer.fp16_partitioned_groups_flat
        for mine, stepped in zip(weights, flat_weight_shards(engine), strict=True):
            if mine.dtype is stepped.dtype:
                stepped.data = mine
    return engine


def import_deepspeed(device: torch.device) -> Any:
    """Import deepspeed for this kind of device, with its warnings in eke's log."""
    os.environ["DS_ACCELERATOR"] = device.type
    # DeepSpeed reads it in every step. Accelerate, which would misread it, has already run.
    os.environ.setdefault(LOCAL_RANK, "0")
    import deepspeed

    chatter = logging.getLogger("DeepSpeed")
    chatter.handlers.clear()  # deepspeed 0.19 prints to stdout
    chatter.setLevel(logging.WARNING)
    chatter.propagate = True
    return deepspeed


def _compute_under_autocast(model: nn.Module, formats: Formats) -> None:
    """Run all forward passes in the plan's format: the engine disables an outer autocast."""
    plain = model.forward

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with formats.autocast() if model.training else formats.eval_autocast():
            return plain(*args, **kwargs)

    model.forward = forward


def flat_weight_shards(engine: Engine) -> list[Tensor]:
    """Return this rank's float32 weights of the optimizer as flat shards."""
    if engine.zero_optimization_stage() == 3:
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return list(engine.optimizer.single_partition_of_fp32_groups)


def shard_lengths(engine: Engine) -> list[int]:
    """Return the number of elements of each flat shard, in memory or in a file."""
    if engine.zero_optimization_stage() == 3:
        return [int(length) for length in engine.optimizer.fp16_partitioned_groups_flat_numel]
    return [piece.numel() for piece in flat_weight_shards(engine)]


def engine_weights(engine: Engine) -> list[nn.Parameter]:
    """Return the model's weights that the flat shards contain."""
    zero = engine.optimizer
    groups = zero.fp16_groups if engine.zero_optimization_stage() == 3 else zero.bit16_groups
    return [weight for group in groups for weight in group]


def _tensors_within(value: Any, depth: int = 3) -> list[Tensor]:
    """Return tensors in containers nested up to `depth`, and in ZeRO's buckets."""
    if isinstance(value, Tensor):
        return [value]
    if type(value).__name__ == "IPGBucket":  # a dataclass of deepspeed 0.19.8, ipg_bucket.py
        value = vars(value)
    parts = value.values() if isinstance(value, dict) else value
    if depth < 0 or not isinstance(value, dict | list | tuple):
        return []
    return [tensor for each in parts for tensor in _tensors_within(each, depth - 1)]


class DeepSpeedUpdate(Update):
    """Update by the engine, which exchanges, clips and applies gradients."""

    def __init__(self, plan: Plan, engine: Engine, device: torch.device) -> None:
        self.engine = engine
        # These two communicate in every pass, so all ranks need the same number of passes.
        self.even = plan.ranks.zero_stage >= 2
        self.device = device
        self.world_size = plan.batch.world_size
        self.scale = LossScale() if plan.compute.loss_scaling else None

    def exchange(self, last: bool) -> AbstractContextManager[None]:
        """Exchange gradients in the last micro-batch with ZeRO-1, in each with ZeRO-2 and 3."""
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor, num_targets: float) -> None:
        """Add gradients of the loss times the ranks: DeepSpeed averages instead of summing."""
        if self.scale:
            self.engine.optimizer.override_loss_scale(self.scale.value)
        self.engine.backward(loss * (self.world_size / num_targets), scale_wrt_gas=False)

    def apply(self) -> Tensor:
        """Take one step of the engine. With float16, a step with overflow is skipped."""
        self.engine.step()
        if self.scale:
            self.scale.update(overflowed=bool(self.engine.optimizer.overflow))
        norm = self.engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self.device).detach()

    def held(self) -> list[Tensor]:
        """Return flat shards, gradients, sharded weights and buffers of the engine."""
        engine = self.engine
        pieces = flat_weight_shards(engine)
        weights = [p.ds_tensor for p in engine.module.parameters() if hasattr(p, "ds_tensor")]
        gradients = [p.grad for p in pieces if p.grad is not None]
        buffers = [buffer for part in swap_buffers(engine) for buffer in part]
        return [*pieces, *weights, *gradients, *buffers, *_tensors_within(vars(engine.optimizer))]

    def hold(self, model: nn.Module) -> Held:
        """Return weights, and names and ranges of this rank's flat shards. Collective."""
        import deepspeed

        found, tied = named_weights(model)
        pieces: dict[str, Piece] = {}
        for name, tensor in found.items():
            mine = getattr(tensor, "ds_tensor", None)  # with ZeRO-3
            in_file = mine is not None and mine.status.name != "AVAILABLE"
            with deepspeed.zero.GatheredParameters([tensor] if in_file else []):
                if mine is None or in_file:
                    piece = row_piece(tensor, dist.get_rank(), self.world_size)
                else:
                    piece = _range_of(tensor, mine, 0)
                pieces[name] = replace(piece, tensor=piece.tensor.clone()) if in_file else piece
        held = Held(pieces, {"tied": tied}, dist.get_rank(), self.world_size)
        return hold_state(held, self.stepped(model), self.engine.basic_optimizer.state)

    def stepped(self, model: nn.Module) -> list[Stepped]:
        """Return the flat shards with their elements of each weight."""
        names = {id(tensor): name for name, tensor in named_weights(model)[0].items()}
        copies = bool(self.engine.bfloat16_enabled())
        return [
            Stepped(
                piece,
                partial(self._views, names, number),
                copies,
                partial(in_memory, self.engine, number),
            )
            for number, piece in enumerate(flat_weight_shards(self.engine))
        ]

    def _views(self, names: Mapping[int, str], number: int, shard: Tensor) -> dict[str, Piece]:
        """Return views of this rank's elements of each weight in a shard or an equal tensor."""
        zero, rank, at = self.engine.optimizer, dist.get_rank(), 0
        found: dict[str, Piece] = {}
        if self.engine.zero_optimization_stage() == 3:
            for weight in zero.fp16_groups[number]:
                found[names[id(weight)]] = _range_of(weight, shard, at)
                at += weight.partition_numel()
            return found
        places = zero.round_robin_bit16_groups[number], zero.round_robin_bit16_offsets[number]
        begin, end = rank * zero.partition_size[number], (rank + 1) * zero.partition_size[number]
        for weight, offset in zip(*places, strict=True):
            first, last = max(offset, begin), min(offset + weight.numel(), end)
            view = shard.detach()[first - begin : max(first, last) - begin]
            found[names[id(weight)]] = Piece(view, first - offset, tuple(weight.shape))
        return found


def _range_of(weight: Any, shard: Tensor, at: int) -> Piece:
    """Return a view of a ZeRO-3 weight's elements in this rank's `shard`, which begin at `at`."""
    size = weight.partition_numel()
    first = min(dist.get_rank() * size, weight.ds_numel)
    view = shard.detach()[at : at + min(size, weight.ds_numel - first)]
    return Piece(view, first, tuple(weight.ds_shape))


def parts_of(plan: Plan, device: torch.device, ranks: Ranks) -> Parts | None:
    """Return a holder of this rank's rows of the weights, None without sharding."""
    if ranks.world_size > 1 and plan.ranks.fsdp:
        return Parts(build_mesh(plan, device))
    if ranks.world_size > 1 and plan.ranks.zero_stage == 3:
        return Parts(init_device_mesh(device.type, (ranks.world_size,), mesh_dim_names=("shard",)))
    return None


def share_model(
    plan: Plan, accelerator: Accelerator, model: nn.Module, parts: Parts | None
) -> nn.Module:
    """Shard or wrap the model, before the optimizer is built."""
    if plan.deepspeed is not None:
        return model  # sharded later by its engine
    if parts:
        parts.put(model, lambda: shard_model(plan, model, parts.mesh))
        return model
    if plan.config.engine.is_trainer:
        return model  # Trainer wraps it with a separate Accelerator
    prepared: nn.Module = accelerator.prepare_model(model)
    return prepared


class ShardedUpdate(PlainUpdate):
    """Update with gradient exchange in backward, of this rank's shard of each tensor."""

    even = True

    def __init__(self, plan: Plan, *objects: Any) -> None:
        super().__init__(plan, *objects)
        self.every = exchange_of(plan.config) is GradientSync.every
        self.gradient_bytes = 0
        """Bytes of this rank's gradients, measured in the first step."""

    def exchange(self, last: bool) -> AbstractContextManager[None]:
        """Set whether the next backward pass exchanges gradients."""
        sharded: Any = self.model
        sharded.set_requires_gradient_sync(last or self.every)  # else full gradients accumulate
        return nullcontext()

    def apply(self) -> Tensor | None:
        """Take one step on the shards, and return the norm of the full gradient."""
        for scalar in replicated(self.model):
            if scalar.requires_grad:
                scalar.grad = torch.zeros_like(scalar) if scalar.grad is None else scalar.grad
                dist.all_reduce(scalar.grad)
                scalar.grad /= self.world_size  # as FSDP2's exchange
        if not self.gradient_bytes:
            gradients = [p.grad for p in self.parameters]
            self.gradient_bytes = part_bytes(g for g in gradients if g is not None)
        norm = super().apply()
        return None if norm is None else full_tensor(norm)

    def hold(self, model: nn.Module) -> Held:
        """Return this rank's rows of weights and optimizer state."""
        return hold(model, self.optimizer)
