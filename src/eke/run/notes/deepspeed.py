"""What DeepSpeed's engine really does: its stage, and where this rank's training state lives."""

from typing import Any

import torch
from torch import Tensor

from eke.build.deepspeed import Engine, flat_pieces
from eke.run.deepspeed_update import DeepSpeedUpdate
from eke.run.job import Job


def note_deepspeed(job: Job) -> None:
    """Read it from the engine and its tensors; warn where that is not what was planned."""
    if not isinstance(job.update, DeepSpeedUpdate):
        return
    assert job.plan.deepspeed is not None, "an engine without a plan for it"
    found = look_at(job.update.engine)
    job.effective["deepspeed"] = found
    zero = job.plan.deepspeed["zero_optimization"]
    if found["stage"] != zero["stage"]:
        job.warn(
            f"distributed=zero{zero['stage']} had no effect: the engine is at {found['stage']}"
        )
    processes = job.plan.batch.world_size
    if found["processes"] != processes:
        job.warn(f"DeepSpeed shares out between {found['processes']} processes, not {processes}")
    if zero["stage"] == 3 and found["cut_weights"] == 0:
        job.warn("distributed=zero3 had no effect on weights: each is small enough to stay whole")
    wanted = {"offload_optimizer": "optimizer_device", "offload_param": "weights_device"}
    for key, where in wanted.items():
        planned = zero.get(key, {}).get("device")
        if planned is not None and found[where] != planned:
            job.warn(f"offload had no effect: {where} is {found[where]}, not {planned}")


def look_at(engine: Engine) -> dict[str, Any]:
    """The engine's answers, as plain values; bytes and counts are this rank's."""
    pieces = flat_pieces(engine)
    weights = list(engine.module.parameters())
    cut = [p for p in weights if hasattr(p, "ds_tensor") and p.ds_numel != p.numel()]
    stores = [p.ds_tensor if hasattr(p, "ds_tensor") else p for p in weights]
    states = [
        value
        for state in engine.basic_optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() > 0
    ]
    return {
        "engine": type(engine).__name__,
        "zero_optimizer": type(engine.optimizer).__name__,
        "optimizer": type(engine.basic_optimizer).__name__,
        "stage": int(engine.zero_optimization_stage()),
        "processes": int(engine.dp_world_size),
        "piece_numbers": sum(piece.numel() for piece in pieces),
        "cut_weights": len(cut),
        "whole_weights": len(weights) - len(cut),
        "weights_bytes": _bytes(stores),
        "optimizer_device": _device(states or pieces),
        "weights_device": _device(stores),
        "optimizer_bytes": _bytes(pieces) + _bytes(states),
    }


def _device(tensors: list[Tensor]) -> str:
    return "+".join(sorted({tensor.device.type for tensor in tensors}))


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
