"""Formats of the weights, and what the optimizer keeps for them."""

from typing import Any

import torch
from torch.optim import Optimizer

from eke.build.optimizer.lowrank import projected_parameters
from eke.build.optimizer.states import is_quantised, num_paged_bytes, state_tensors
from eke.plan import NAMED_IMPLEMENTATIONS
from eke.run.job import Job
from eke.schema import AdamW8bit, AdamWTorchAO4bit, AdamWTorchAO8bit, Apollo, GaLore, Lion8bit


def note_states(job: Job) -> None:
    """Formats of weights and what the optimizer's state is, after the first full steps."""
    found = describe_states(job.optimizer, job.parameters)
    job.effective["weight_dtypes"] = sorted(
        {str(p.dtype).removeprefix("torch.") for p in job.parameters}
    )
    job.effective |= found
    config = job.plan.config.optimizer
    _note_class(job, found)
    for schemas, key, what in WANTED:
        if isinstance(config, schemas) and not found[key]:
            job.warn(f"optimizer={config.option} had no effect: {what}")
    if config.option == "paged_adamw_8bit" and not found["optimizer_paged_bytes"]:
        job.warn(f"optimizer={config.option} had no effect: no state is paged")
    if config.option == "adamw_bf16_sr" and not found["optimizer_stochastic_rounding"]:
        job.warn(f"optimizer={config.option} had no effect: no weight is rounded at random")


TORCH = "AdamW torch"
CLASSES = {
    "adamw": (TORCH, "DeepSpeedCPUAdam deepspeed"),
    "adamw_forloop": (TORCH,),
    "adamw_foreach": (TORCH,),
    "adamw_fused": (TORCH,),
    "adamw_apex_fused": ("FusedAdam apex",),
    "adafactor": ("Adafactor transformers",),
    "lion": ("Lion bitsandbytes",),
    "sgd": ("SGD torch",),
    "muon": ("Muon+AdamW torch", "Muon torch"),
    "schedule_free": ("AdamWScheduleFree schedulefree",),
}
"""Option -> class and library of what it builds; what the others do shows in their state."""


def _note_class(job: Job, found: dict[str, Any]) -> None:
    """Warn where the optimizer, or its loop over the weights, is another one than asked for."""
    option = job.plan.config.optimizer.option
    built = f"{found['optimizer']} {found['optimizer_library']}"
    if option in CLASSES and built not in CLASSES[option]:
        job.warn(f"optimizer={option} had no effect: it is {found['optimizer']}")
        return
    loop = found["optimizer_implementation"]
    if option in NAMED_IMPLEMENTATIONS and loop != NAMED_IMPLEMENTATIONS[option]:
        job.warn(f"optimizer={option} had no effect: the implementation is {loop or 'its own'}")


QUANTISED = (AdamW8bit, AdamWTorchAO8bit, AdamWTorchAO4bit, Lion8bit)

WANTED: tuple[tuple[tuple[type, ...], str, str], ...] = (
    (QUANTISED, "optimizer_quantised_frac", "no state is quantised"),
    ((GaLore, Apollo), "optimizer_projected_frac", "no state is projected"),
)
"""Schemas, the number that shows their effect, and what a zero means."""


def describe_states(optimizer: Optimizer, parameters: list[torch.nn.Parameter]) -> dict[str, Any]:
    """What the optimizer is and keeps, read from it: classes, bytes, and shares of `parameters`."""
    # DeepSpeed's ZeRO-3 leaves empty weights behind, and their sizes in an attribute.
    count = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    num_bytes = sum(t.numel() * t.element_size() for t in state_tensors(optimizer))
    quantised = [p for p, state in optimizer.state.items() if is_quantised(state)]
    parts = getattr(optimizer, "parts", (optimizer,))
    return {
        "optimizer": "+".join(type(part).__name__ for part in parts),
        "optimizer_library": type(parts[0]).__module__.partition(".")[0],
        "optimizer_implementation": _implementation(optimizer),
        "optimizer_state_bytes": num_bytes,
        "optimizer_bytes_per_parameter": num_bytes / count,
        "optimizer_parameters": [_num_parameters(part) for part in parts],
        "optimizer_quantised_frac": sum(p.numel() for p in quantised) / count,
        "optimizer_projected_frac": sum(p.numel() for p in projected_parameters(optimizer)) / count,
        "optimizer_paged_bytes": num_paged_bytes(optimizer),
        "optimizer_stochastic_rounding": _rounds_at_random(optimizer, parameters),
    }


def _num_parameters(optimizer: Optimizer) -> int:
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def _rounds_at_random(optimizer: Optimizer, parameters: list[torch.nn.Parameter]) -> bool:
    """Torchao's optimizers round bfloat16 weights so, and no others."""
    wanted = bool(getattr(optimizer, "bf16_stochastic_round", False))
    return wanted and any(p.dtype is torch.bfloat16 for p in parameters)


def _implementation(optimizer: torch.optim.Optimizer) -> str:
    group: dict[str, Any] = optimizer.param_groups[-1]
    if group.get("fused"):
        return "fused"
    if group.get("foreach"):
        return "foreach"
    return "forloop" if "foreach" in group else ""
