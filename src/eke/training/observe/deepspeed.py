"""What DeepSpeed's engine really does: its stage, and where this rank's training state lives."""

from typing import Any

import torch
from torch import Tensor

from eke.plan.planner import swap_files, swap_folder
from eke.training.distributed.deepspeed import Engine, flat_pieces, piece_numbers
from eke.training.distributed.deepspeed_update import DeepSpeedUpdate
from eke.training.distributed.swapping import in_files, swap_buffers
from eke.training.loop.state import Job


def note_deepspeed(job: Job) -> None:
    """Read it from the engine and its tensors; warn where that is not what was planned."""
    if not isinstance(job.update, DeepSpeedUpdate):
        return
    assert job.plan.deepspeed is not None, "an engine without a plan for it"
    found = look_at(job.update.engine)
    job.effective["deepspeed"] = found
    if (swap := swap_folder(job.plan, job.paths)) is not None:
        found["file_bytes"] = swap_files(swap, job.ranks.rank)
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
        # What is too small for a file stays in memory beside the files.
        if planned is not None and planned not in found[where].split("+"):
            job.warn(f"offload had no effect: {where} is {found[where]}, not {planned}")


def look_at(engine: Engine) -> dict[str, Any]:
    """The engine's answers, as plain values; bytes and counts are this rank's."""
    pieces = flat_pieces(engine)
    weights = list(engine.module.parameters())
    cut = [p for p in weights if hasattr(p, "ds_tensor") and p.ds_numel != p.numel()]
    stores = [p.ds_tensor if hasattr(p, "ds_tensor") else p for p in weights]
    loaded = [store for store in stores if not _is_file(store)]
    states = [
        value
        for state in engine.basic_optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() > 0
    ]
    filed = [in_files(engine, number) for number in range(len(pieces))]
    state_buffers, weight_buffers = swap_buffers(engine)
    return {
        "engine": type(engine).__name__,
        "zero_optimizer": type(engine.optimizer).__name__,
        "optimizer": type(engine.basic_optimizer).__name__,
        "stage": int(engine.zero_optimization_stage()),
        "processes": int(engine.dp_world_size),
        "piece_numbers": sum(piece_numbers(engine)),
        "cut_weights": len(cut),
        "whole_weights": len(weights) - len(cut),
        "weights_bytes": _bytes([*loaded, *weight_buffers]),
        "optimizer_device": _places([t for t in states or pieces if t.numel()], any(filed)),
        "weights_device": _places(loaded, len(loaded) < len(stores)),
        "optimizer_bytes": _bytes([*pieces, *states, *state_buffers]),
    }


def _is_file(weight: Tensor) -> bool:
    """Whether DeepSpeed reads this weight from a file when its layer runs."""
    return getattr(weight, "final_location", None) == "nvme"


def _places(tensors: list[Tensor], files: bool) -> str:
    """Kinds of devices that hold them, and DeepSpeed's word for files."""
    kinds = {tensor.device.type for tensor in tensors}
    return "+".join(sorted(kinds | {"nvme"} if files else kinds))


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Of different tensors: bitsandbytes gives one table of values to all pieces."""
    different = {(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors}
    return sum(different.values())
