"""Effective use of libraries, read from running objects: compiler, DeepSpeed, kernels, loaders."""

import dataclasses
import json
import os
from collections import Counter
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from eke.config.schema import Attention, Backend, CustomModel, Packing, PeerToPeer
from eke.models.families import family_of
from eke.models.sizes import is_ragged
from eke.plan.planner import swap_files, swap_folder
from eke.training.distributed.build_operators import Engine, in_files, swap_buffers
from eke.training.distributed.deepspeed_engine import (
    DeepSpeedUpdate,
    ShardedUpdate,
    flat_weight_shards,
    shard_lengths,
)
from eke.training.distributed.fsdp import groups_of, is_sharded, part_bytes
from eke.training.distributed.ranks import P2P_VARIABLE, LossOnDevice
from eke.training.loop.training_state import TrainingState
from eke.training.model.attention_kernels import ATTENTION, EXPECTED, KernelProbe
from eke.training.model.loss import has_fused_loss, is_sparse, loss_head, replaced_modules
from eke.training.model.number_formats import num_graphs
from eke.training.optimizer.build_optimizer import state_tensors


def _note_compiler(job: TrainingState) -> None:
    """Warn if the compiler has not captured a graph by the end of the second step."""
    option = job.plan.config.compile.option
    if option != "none" and not num_graphs(job.plan):
        job.warn(f"compile={option} had no effect: 0 graphs were captured")


def _note_deepspeed(job: TrainingState) -> None:
    """Record stage and placement of the state, and warn if they differ from the plan."""
    if not isinstance(job.update, DeepSpeedUpdate):
        return
    assert job.plan.deepspeed is not None, "a plan for the engine"
    found = _read_engine_settings(job.update.engine)
    job.effective["deepspeed"] = found
    if (swap := swap_folder(job.plan, job.paths)) is not None:
        found["file_bytes"] = swap_files(swap, job.ranks.rank)
    zero = job.plan.deepspeed["zero_optimization"]
    stage, processes = zero["stage"], job.plan.batch.world_size
    if found["stage"] != stage:
        job.warn(f"distributed=zero{stage} had no effect: the engine is at {found['stage']}")
    if found["processes"] != processes:
        job.warn(f"DeepSpeed shards between {found['processes']} processes, not {processes}")
    if stage == 3 and found["cut_weights"] == 0:
        job.warn("distributed=zero3 had no effect on weights: all are below the sharding threshold")
    wanted = {"offload_optimizer": "optimizer_device", "offload_param": "weights_device"}
    for key, where in wanted.items():
        planned = zero.get(key, {}).get("device")
        # State too small for a file stays in memory.
        if planned is not None and planned not in found[where].split("+"):
            job.warn(f"offload had no effect: {where} is {found[where]}, not {planned}")


def _read_engine_settings(engine: Engine) -> dict[str, Any]:
    """Return properties of the engine as plain values, with bytes and counts of this rank."""
    shards = flat_weight_shards(engine)
    weights = list(engine.module.parameters())
    cut = [p for p in weights if hasattr(p, "ds_tensor") and p.ds_numel != p.numel()]
    stores = [p.ds_tensor if hasattr(p, "ds_tensor") else p for p in weights]
    # DeepSpeed reads other weights from files when their layers run.
    loaded = [store for store in stores if getattr(store, "final_location", None) != "nvme"]
    states = state_tensors(engine.basic_optimizer)
    filed = [in_files(engine, number) for number in range(len(shards))]
    state_buffers, weight_buffers = swap_buffers(engine)
    held = {store.untyped_storage().data_ptr() for store in loaded}
    copies = [s for s in shards if s.untyped_storage().data_ptr() not in held]
    return {
        "engine": type(engine).__name__,
        "zero_optimizer": type(engine.optimizer).__name__,
        "optimizer": type(engine.basic_optimizer).__name__,
        "stage": int(engine.zero_optimization_stage()),
        "processes": int(engine.dp_world_size),
        "piece_numbers": sum(shard_lengths(engine)),
        "cut_weights": len(cut),
        "whole_weights": len(weights) - len(cut),
        "weights_bytes": _bytes([*loaded, *weight_buffers]),
        "optimizer_device": _device_kinds([t for t in states or shards if t.numel()], any(filed)),
        "weights_device": _device_kinds(loaded, len(loaded) < len(stores)),
        "optimizer_bytes": _bytes([*copies, *states, *state_buffers]),
    }


def _device_kinds(tensors: list[Tensor], files: bool) -> str:
    """Return kinds of devices that hold the tensors, and "nvme" for files."""
    kinds = {tensor.device.type for tensor in tensors}
    return "+".join(sorted(kinds | {"nvme"} if files else kinds))


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of distinct tensors. bitsandbytes shares one table among all shards."""
    different = {(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors}
    return sum(different.values())


_MANY = 0.9
"""Fraction of labelled positions above which selecting them saves too little."""


def note_kernels(job: TrainingState, seen: KernelProbe) -> None:
    """Record formats and kernels of one step, and warn if they differ from the configuration."""
    plan = job.plan
    job.effective["matmul_dtypes"] = seen.matmul_dtypes
    wanted = plan.compute.matmul
    compiled = plan.config.compile.is_on
    if wanted not in seen.matmul_dtypes and (seen.matmul_dtypes or not compiled):
        ran = f"matrix multiplications ran in {', '.join(seen.matmul_dtypes) or 'no format'}"
        job.warn(f"precision.compute={wanted} had no effect: {ran}")
    _note_attention(job, seen)
    job.effective["loss_kernels"] = sorted(seen.loss_kernels)
    _note_sparse(job)
    if has_fused_loss(plan) and "linear_cross_entropy" not in seen.loss_kernels:
        job.warn("kernels.fused_linear_cross_entropy=true had no effect: the loss used all logits")
    if plan.config.kernels.is_liger:
        count = job.effective["liger_modules"] = replaced_modules(job.bare_model)
        if not count:
            job.warn("kernels=liger had no effect: no module uses Liger's forward pass")


def _note_attention(job: TrainingState, seen: KernelProbe) -> None:
    attention = job.plan.config.attention
    if isinstance(job.plan.config.model, CustomModel):
        job.effective["attention_kernels"] = sorted(seen.attention_kernels)
        return
    config: Any = job.bare_model.config
    implementation = str(getattr(config, "_attn_implementation", ""))
    job.effective["attention_implementation"] = implementation
    if family_of(job.plan.config).is_moe:
        job.effective["experts_implementation"] = getattr(config, "_experts_implementation", None)
    ran = seen.attention_kernels
    job.effective["attention_kernels"] = sorted(ran)
    if implementation != ATTENTION[attention.option]:
        job.warn(f"attention={attention.option} had no effect: the model uses {implementation}")
        return
    if not ran and job.plan.config.compile.is_on:
        return  # the compiler fuses eager and math attention with other operations
    if not ran or ran - expected_kernels(attention):
        pinned = attention.backend is not Backend.auto
        requested = f".backend={attention.backend.value}" if pinned else f"={attention.option}"
        kernels = ", ".join(sorted(ran)) or "no known kernel"
        job.warn(f"attention{requested} had no effect: attention ran in {kernels}")


def expected_kernels(attention: Attention) -> frozenset[str]:
    """Return the kernels of `KernelProbe` of which at least one should run."""
    is_sdpa = attention.option == "sdpa"
    return EXPECTED[attention.backend] if is_sdpa else frozenset({attention.option})


def _note_sparse(job: TrainingState) -> None:
    head = loss_head(job.bare_model) if is_sparse(job.plan) else None
    if head is None or head.projected is None:
        return  # compiled code does not count positions
    projected, of = head.projected
    job.effective["projected_positions"] = f"{projected} of {of}"
    if projected > _MANY * of:
        few = f"{projected} of {of} positions have a label"
        job.warn(f"kernels.sparse_prediction=true saves little: {few}")


def note_trainer(job: TrainingState, trainer: Any) -> None:
    """Record the class and the changed arguments of Trainer, and warn of `extra` without effect."""
    base = next(cls for cls in type(trainer).__mro__ if cls.__module__.startswith("transformers."))
    defaults = {f.name: f.default for f in dataclasses.fields(trainer.args)}
    in_force = {name: getattr(trainer.args, name) for name in defaults}
    changed = {n: v for n, v in in_force.items() if n != "output_dir" and v != defaults[n]}
    text = json.dumps(changed, default=lambda v: v.value if isinstance(v, Enum) else str(v))
    kind = f"{base.__module__}.{base.__qualname__}"
    job.effective["trainer"] = {"class": kind, "arguments": json.loads(text)}
    for name, requested in job.plan.config.trainer.extra.items():
        if requested == defaults.get(name):
            job.warn(f"trainer.extra.{name}={requested} had no effect: equal to Trainer's default")


def _note_loading(job: TrainingState) -> None:
    """Record running loader processes, batches prepared ahead, and the memory of batches."""
    data, config = job.data, job.plan.config.dataloader
    workers = _num_running_workers(data.loading)
    kept = _num_running_workers(getattr(data.eval_loading, "_iterator", None))
    ahead = getattr(data.loading, "_prefetch_factor", None) or 0  # per process
    job.effective["loader_workers"] = workers
    job.effective["loader_batches_ahead"] = workers * int(ahead)
    job.effective["loader_workers_kept"] = kept
    job.effective["loader_pinned"] = bool(data.pinned)
    if workers < config.workers:
        job.warn(f"dataloader.workers = {config.workers}: {workers} loader processes are running")
    if config.persistent and not kept:
        job.warn("dataloader.persistent had no effect: evaluation's loader processes have ended")
    if job.plan.compute.pin_memory and not data.pinned:
        job.warn("dataloader.pin_memory had no effect: batches were in pageable memory")


def note_packing(job: TrainingState) -> None:
    """Record the mean number of sequences per row in this attempt."""
    packing, shared = job.plan.config.data.packing, job.data.sequences_per_row
    if shared is not None:
        job.effective["sequences_per_row"] = shared
    if packing is Packing.off or not is_ragged(job.plan.config):
        return  # for samples of equal length, a rule has warned before the start
    if shared is None or shared <= 1:
        job.warn(f"data.packing={packing.value} had no effect: no row held two sequences")


def _num_running_workers(iterator: Any) -> int:
    """Return the number of running processes of a DataLoader's iterator (torch: `_workers`)."""
    return sum(process.is_alive() for process in getattr(iterator, "_workers", ()))


def note_devices(job: TrainingState) -> None:
    """Record the devices on which DataParallel's copies ran."""
    module = getattr(job.model, "module", None)
    if not isinstance(module, LossOnDevice):
        return
    job.effective["data_parallel_devices"] = sorted(module.devices)
    used, devices = len(module.devices), job.plan.batch.devices
    if used < devices:
        job.warn(f"distributed=dp used {used} of {devices} devices: each needs at least one row")


def note_copies(job: TrainingState) -> None:
    """Record how many processes exchange gradients, except with Trainer's own wrapper."""
    if not job.plan.ranks.is_ddp or job.plan.config.engine.is_trainer:
        return
    wrapped = [m for m in job.model.modules() if isinstance(m, DistributedDataParallel)]
    processes = wrapped[0].process_group.size() if wrapped else 1
    job.effective["copies"] = processes
    if processes != (planned := job.plan.batch.world_size):
        exchanged = f"gradients of {processes} of {planned} processes are exchanged"
        job.warn(f"distributed=ddp had no effect: {exchanged}")


def note_sharding(job: TrainingState) -> None:
    """Record sharded bytes of weights, gradients and optimizer state by rank. Collective."""
    plan = job.plan
    if not plan.ranks.fsdp or plan.batch.world_size == 1:
        return
    parameters = list(job.bare_model.parameters())
    cut: list[Any] = [p for p in parameters if is_sharded(p)]  # DTensors of FSDP2
    gradients = job.update.gradient_bytes if isinstance(job.update, ShardedUpdate) else None
    mine = {
        "weights": part_bytes(parameters),
        "gradients": gradients,
        "optimizer": part_bytes(state_tensors(job.optimizer)),
    }
    job.effective["sharding"] = {
        "mesh": list(cut[0].device_mesh.shape) if cut else [],
        "sharded_parameters": sum(p.numel() for p in cut),
        "parameters": sum(p.numel() for p in parameters),
        "state_bytes_per_rank": job.ranks.gather(mine),
    }
    groups = groups_of(job.bare_model.modules())
    # Formats of the actual buffers, whatever the policy requested.
    sent = Counter[str]()
    for buffer in (b for g in groups for w in g.fsdp_params for b in w.all_gather_outputs):
        sent[str(buffer.dtype).removeprefix("torch.")] += buffer.numel()
    job.effective["sharding"]["gathered_numbers"] = dict(sent)
    if groups and plan.compute.gathered and plan.compute.gathered not in sent:
        job.warn(f"distributed=fsdp sent no weight in {plan.compute.gathered}")
    if not cut:
        job.warn("distributed=fsdp had no effect: every process holds full tensors")


def note_transport(job: TrainingState) -> None:
    """Record whether NCCL may use peer-to-peer copies, by rank. Collective."""
    if job.ranks.world_size == 1 or job.device.type != "cuda":
        return
    values = job.ranks.gather(os.environ.get(P2P_VARIABLE, ""))
    # NCCL reads any number except 0 as yes.
    switched_off = [value not in ("", "0") for value in values]
    job.effective["nccl_p2p"] = ["off" if off else "auto" for off in switched_off]
    wanted = job.plan.ranks.p2p
    if any(off != (wanted is PeerToPeer.off) for off in switched_off):
        found = ", ".join(value or "unset" for value in values)
        job.warn(f"distributed.p2p={wanted.value}, but {P2P_VARIABLE} is {found} on the ranks")


LIBRARY_NOTES = (
    _note_loading,
    note_sharding,
    _note_deepspeed,
    note_devices,
    note_copies,
    _note_compiler,
    note_transport,
)
"""Notes taken once, after the second step, in the same order on all ranks: some are collective."""
