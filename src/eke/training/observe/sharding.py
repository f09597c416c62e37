"""What each process really holds and feeds, where work or state was to be shared out."""

from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from eke.config.schema import FSDP
from eke.training.checkpoint.sharded import ShardedUpdate
from eke.training.distributed.data_parallel import LossOnDevice
from eke.training.distributed.sharding import is_cut, mesh_of, part_bytes
from eke.training.loop.state import Job


def note_devices(job: Job) -> None:
    """Where DataParallel's copies really ran."""
    module = getattr(job.model, "module", None)
    if not isinstance(module, LossOnDevice):
        return
    job.effective["data_parallel_devices"] = sorted(module.devices)
    if len(module.devices) < job.plan.batch.devices:
        job.warn(
            f"distributed=dp used {len(module.devices)} of {job.plan.batch.devices} devices: "
            "each takes a row at least"
        )


def note_copies(job: Job) -> None:
    """How many processes exchange their copies' gradients; Trainer's wrapper is its own."""
    config = job.plan.config
    if config.distributed.option != "ddp" or config.engine.option != "loop":
        return
    wrapped = [m for m in job.model.modules() if isinstance(m, DistributedDataParallel)]
    processes = wrapped[0].process_group.size() if wrapped else 1
    job.effective["copies"] = processes
    if processes != job.plan.batch.world_size:
        job.warn(
            f"distributed=ddp had no effect: gradients of {processes} of "
            f"{job.plan.batch.world_size} processes are exchanged"
        )


def note_sharding(job: Job) -> None:
    """Parts of weights, gradients and optimizer state, per rank; all ranks take part."""
    plan = job.plan
    if not isinstance(plan.config.distributed, FSDP) or plan.batch.world_size == 1:
        return
    states = [
        value
        for state in job.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() > 0
    ]
    parameters = list(job.bare_model.parameters())
    cut = [p for p in parameters if is_cut(p)]
    gradients = job.update.gradient_bytes if isinstance(job.update, ShardedUpdate) else None
    mine = {
        "weights": part_bytes(parameters),
        "gradients": gradients,
        "optimizer": part_bytes(states),
    }
    found: dict[str, Any] = {
        "mesh": mesh_of(parameters),
        "sharded_parameters": sum(p.numel() for p in cut),
        "parameters": sum(p.numel() for p in parameters),
        "state_bytes_per_rank": job.ranks.gather(mine),
    }
    job.effective["sharding"] = found
    if not cut:
        job.warn("distributed=fsdp had no effect: every process holds all of every tensor")
