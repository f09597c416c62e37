"""Formats of the weights, and what the optimizer keeps for them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from eke.config.schema import Optimizer as OptimizerConfig
from eke.models.sizes import algorithm, describe
from eke.models.sizes.optimizer_descriptions import AUTO
from eke.training.loop.state import Job
from eke.training.optimizer.galore_apollo import projected_parameters
from eke.training.optimizer.states import is_quantised, num_paged_bytes, state_tensors


def note_states(job: Job) -> None:
    """Formats of weights and what the optimizer's state is, after the first full steps."""
    found = describe_states(job.optimizer, job.parameters)
    job.effective["weight_dtypes"] = sorted(
        {str(p.dtype).removeprefix("torch.") for p in job.parameters}
    )
    job.effective |= found
    config = job.plan.config.optimizer
    _note_class(job, found)
    for wanted, key, what in _effects(config):
        if wanted and not found[key]:
            job.warn(f"optimizer={config.option} had no effect: {what}")


def _effects(config: OptimizerConfig) -> Iterator[tuple[bool, str, str]]:
    """Whether it is the option's, the number that shows it, and what a zero means."""
    kept, known = algorithm(config), describe(config)
    yield kept.quantises is not None, "optimizer_quantised_frac", "no state is quantised"
    yield kept.projects, "optimizer_projected_frac", "no state is projected"
    yield known.pages, "optimizer_paged_bytes", "no state is paged"
    at_random = "optimizer_stochastic_rounding"
    yield known.rounds_at_random, at_random, "no weight is rounded at random"


def _note_class(job: Job, found: dict[str, Any]) -> None:
    """Warn where the optimizer, or its loop over the weights, is another one than asked for."""
    option, known = job.plan.config.optimizer.option, describe(job.plan.config.optimizer)
    built = f"{found['optimizer']} {found['optimizer_library']}"
    if known.built and built not in known.built:
        job.warn(f"optimizer={option} had no effect: it is {found['optimizer']}")
        return
    loop = found["optimizer_implementation"]
    if known.implementation not in ("", AUTO, loop):
        job.warn(f"optimizer={option} had no effect: the implementation is {loop or 'its own'}")


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
