"""DeepSpeed's engine around a model and an optimizer that eke has built.

Precision stays eke's: autocast is put around the model's own forward pass, inside the engine, which
would switch off one that surrounds it (deepspeed 0.19.8, `autocast_if_enabled`).
"""

import functools
import importlib
import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eke.common.paths import LOCAL_RANK
from eke.plan.planner import Plan
from eke.training.distributed.swapping import piece_lengths, prepare_swap, swap_buffers
from eke.training.model.precision import Formats

Engine = Any
"""`deepspeed.DeepSpeedEngine`, which has no type annotations."""

LOCKSTEP = ("zero2", "zero3")
"""Options whose ranks exchange something in every forward or backward pass: all run as many."""


def build_engine(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    formats: Formats,
    device: torch.device,
    swap: Path | None = None,
) -> Engine:
    """The engine that shares out what the plan says.

    With ZeRO-3 each weight is moved to the device and cut by itself, so that the device never holds
    the whole model; the host does, until then. Ranks must have built equal models.

    Args:
        plan: with DeepSpeed's configuration.
        model: with its weights; on the host for ZeRO-3, else on `device`.
        optimizer: over the parameters of `model`; gets DeepSpeed's flat pieces instead.
        formats: autocast of the forward pass.
        device: this rank's.
        swap: folder for state that is to lie in files.
    """
    deepspeed = import_deepspeed(device)
    settings = plan.deepspeed
    assert settings is not None, "no plan for DeepSpeed"
    if swap is not None:
        settings = prepare_swap(settings, swap)
    ensure_process_group(device)
    spare_shared_memory_kernels()
    deepspeed.init_distributed(auto_mpi_discovery=False)  # takes the group that is there
    compute_under_autocast(model, formats)
    if settings["zero_optimization"]["stage"] == 3:
        deepspeed.zero.Init(module=model, config_dict_or_path=settings)
        for buffer in model.buffers():  # Init moves parameters only
            buffer.data = buffer.data.to(device)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )
    return engine


def import_deepspeed(device: torch.device) -> Any:
    """The package, for this kind of device, with its chatter in eke's log from warnings on."""
    os.environ["DS_ACCELERATOR"] = device.type
    # Asked for in every step; Accelerate, which would take it for another rank's, has been there.
    os.environ.setdefault(LOCAL_RANK, "0")
    import deepspeed

    chatter = logging.getLogger("DeepSpeed")
    chatter.handlers.clear()  # deepspeed 0.19 prints to stdout
    chatter.setLevel(logging.WARNING)
    chatter.propagate = True
    return deepspeed


def spare_shared_memory_kernels() -> None:
    """Leave a CPU's exchange to gloo.

    deepspeed 0.19.8 would compile C++ for a minute at the first start on a machine (its
    ShareMemComm), for exchanges through shared memory that inference on CPUs is the use of.
    """
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    if hasattr(backend, "build_shm_op"):
        backend.build_shm_op = lambda: None


def ensure_process_group(device: torch.device) -> None:
    """DeepSpeed wants a group even of one; several ranks have joined theirs already."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store: Any = dist.HashStore()  # type: ignore[attr-defined]  # torch 2.13: not exported
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def compute_under_autocast(model: nn.Module, formats: Formats) -> None:
    """Every forward pass of `model` computes in the plan's format, whoever calls it.

    As the loop has it: one format for training and one for evaluation.
    """
    plain = model.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with formats.autocast() if model.training else formats.eval_autocast():
            return plain(*args, **kwargs)

    model.forward = forward


def flat_pieces(engine: Engine) -> list[Tensor]:
    """This rank's float32 weights as the optimizer sees them: one flat piece per group.

    ZeRO-3 cuts groups further, into `sub_group_size` numbers each.
    """
    if engine.zero_optimization_stage() == 3:
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return list(engine.optimizer.single_partition_of_fp32_groups)


def piece_numbers(engine: Engine) -> list[int]:
    """How many numbers each of `flat_pieces` holds, be it in memory or in a file."""
    if engine.zero_optimization_stage() == 3:
        return piece_lengths(engine)
    return [piece.numel() for piece in flat_pieces(engine)]


def stepped_weights(engine: Engine) -> list[nn.Parameter]:
    """Weights of the model whose numbers are in the flat pieces of some rank."""
    zero = engine.optimizer
    groups = zero.fp16_groups if engine.zero_optimization_stage() == 3 else zero.bit16_groups
    return [weight for group in groups for weight in group]


def gather_weights(engine: Engine, keep: bool, frozen: bool = True) -> dict[str, Tensor]:
    """All weights under the model's own names, on the host, module by module; a collective.

    Args:
        engine: of ZeRO-3.
        keep: whether this rank wants them; the others get an empty dictionary.
        frozen: frozen weights and buffers, too; else the trained ones alone.
    """
    import deepspeed

    engine.optimizer.checkpoint_event_prologue()  # small weights that stay whole are cut, too
    found: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for prefix, module in engine.module.named_modules(remove_duplicate=False):
        own = dict(module.named_parameters(recurse=False))
        own = {name: p for name, p in own.items() if frozen or p.requires_grad}
        with deepspeed.zero.GatheredParameters(list(own.values())):
            for name, weight in own.items() if keep else ():
                if id(weight) not in seen:  # shared weights stay shared
                    seen[id(weight)] = weight.detach().to("cpu", copy=True)
                found[f"{prefix}.{name}".lstrip(".")] = seen[id(weight)]
    engine.optimizer.checkpoint_event_epilogue()
    if keep and frozen:
        names = set(engine.module.state_dict()) - set(found)
        found |= {k: v for k, v in engine.module.state_dict().items() if k in names}
    return found


def held_tensors(engine: Engine) -> list[Tensor]:
    """Tensors of this rank that the model does not know of: pieces, gradients, cut weights.

    With them, whatever the engine's optimizer keeps from step to step beside: ZeRO-3's partition of
    gradients and its bucket, staging areas of offloading (deepspeed 0.19.8, stage3.py,
    `grad_partitions_flat_buffer`; stage_1_and_2.py, `param_buffer_of_bit16_for_cpu_offload_groups`,
    `temp_grad_buffer_for_cpu_offload`).
    """
    pieces = flat_pieces(engine)
    weights = [p.ds_tensor for p in engine.module.parameters() if hasattr(p, "ds_tensor")]
    gradients = [p.grad for p in pieces if p.grad is not None]
    buffers = [buffer for part in swap_buffers(engine) for buffer in part]
    return [*pieces, *weights, *gradients, *buffers, *tensors_within(vars(engine.optimizer))]


NESTED = 3
"""Containers within containers that are looked into: groups of lists of tensors, and one more."""


def tensors_within(value: Any, depth: int = NESTED) -> list[Tensor]:
    """Tensors in nested lists, tuples and dictionaries, and in the buckets that ZeRO keeps."""
    if isinstance(value, Tensor):
        return [value]
    if depth < 0:
        return []
    if type(value).__name__ == "IPGBucket":  # a dataclass of deepspeed 0.19.8, ipg_bucket.py
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return []
    return [tensor for each in value for tensor in tensors_within(each, depth - 1)]
