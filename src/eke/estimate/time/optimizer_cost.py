"""The optimizer's step: bytes it moves, kernels it launches, products it computes.

What each implementation does to a number and to a tensor was counted as the passes were
(benchmarks/update_work.py); the few that no trace shows are named here with what is
assumed of them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eke.estimate.time.products import Contents
from eke.estimate.time.values import Span, exactly
from eke.models.sizes import STAGE, algorithm, describe
from eke.plan.planner import Plan

COUNTED = Path(__file__).parent / "counted_updates.json"

HOST_LOOPS = {"deepspeed_cpu": "adamw_fused"}
"""Implementations of AdamW that no trace shows, and what stands in for them."""

ADDS = 12
"""Bytes per number of a gradient that is added to another: two reads and a write of float32."""


@cache
def counted_updates() -> Mapping[str, Any]:
    """What was counted."""
    content: dict[str, Any] = json.loads(COUNTED.read_text())
    return content


@dataclass(frozen=True)
class Updates:
    """One optimizer step of one process on its device."""

    moved: Span
    """Bytes."""
    launches: float
    flops: float = 0.0
    """Of matrix multiplications, in the narrower format that the optimizer has for them."""
    notes: tuple[str, ...] = ()


def updates(plan: Plan, contents: Contents, numbers: float) -> Updates:
    """What an optimizer step does on the device, clipping and adding up gradients included.

    Args:
        plan: of the run.
        contents: of the model.
        numbers: trained ones that this process updates on its device; 0 where the host does it.
    """
    entry, notes = _entry(plan)
    config, tensors = plan.config, contents.trained_tensors
    shared = numbers < contents.trained
    if shared and config.distributed.option in STAGE:
        tensors = min(tensors, 4)  # flat pieces, one a parameter group
    moved, launches = entry["bytes"] * numbers, 0.0
    if numbers:
        each = entry["each"] if not config.memory.optimizer_in_backward else max(1, entry["each"])
        launches = entry["launches"] + each * tensors
    clip = counted_updates()["clip"]
    if config.train.max_grad_norm is not None and numbers:
        moved += clip["bytes"] * numbers
        launches += clip["launches"] + clip["each"] * tensors
    again = plan.batch.accumulation - 1
    moved += again * ADDS * contents.trained
    launches += again * contents.trained_tensors
    if plan.compute.loss_scaling:
        moved += 8 * numbers  # the scaler reads and writes each gradient once
        launches += 4
    return Updates(exactly(moved), launches, _flops(plan, contents), notes)


def _entry(plan: Plan) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """What was counted of the optimizer."""
    option, table = plan.config.optimizer.option, counted_updates()
    known = describe(plan.config.optimizer)
    stands_in = known.counted_as
    if known.implementation:
        loop = plan.compute.optimizer_implementation or "foreach"
        option, stands_in = f"adamw_{loop}", HOST_LOOPS.get(loop, "")
    note = f"{option}: counted as {stands_in}, which moves about as much" if stands_in else ""
    option = stands_in or option
    narrow = "narrow" if plan.compute.weights != "float32" and not plan.compute.master else "wide"
    found = table.get(f"{option}/{narrow}") or table.get(f"{option}/wide")
    if found is None:
        return table["adamw_fused/wide"], (f"{option}: counted as torch's fused AdamW",)
    return found, ((note,) if note else ())


def _flops(plan: Plan, contents: Contents) -> float:
    """Matrix multiplications inside an update."""
    count = algorithm(plan.config.optimizer).count_flops
    if count is None:
        return 0.0
    return sum(num * count(plan.config, rows, columns) for rows, columns, num in contents.matrices)
