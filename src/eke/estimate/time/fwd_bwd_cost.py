"""Forward and backward passes beside their matrix multiplications: bytes moved, and launches.

What each family's layers do was counted operator by operator on tensors without data, as a GPU
would run them (benchmarks/step_work.py writes counted.json, and tests/unit/estimate/time counts
again): no number in that file is fitted to a time.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eke.estimate.memory.activations import attention_kernel
from eke.estimate.memory.shape import Shape
from eke.estimate.time.units import layer_units, outer_units, stacks_of
from eke.models.families import is_classification
from eke.plan.planner import Plan

COUNTED = Path(__file__).parent / "counted.json"

ALIKE = {"qwen2": "llama", "other": "llama"}
"""Families that were not counted, and whose layers stand in for theirs."""

FIRST_TASK = {"bert": "masked_lm", "t5": "seq2seq_lm"}
"""Family -> the task it was counted with beside classification; causal_lm for any other."""


@dataclass(frozen=True)
class Pass:
    """One micro-batch's forward or backward pass."""

    moved: float
    """Bytes read and written by what is no matrix multiplication."""
    launches: float
    """Kernels, matrix multiplications included."""


@cache
def counted() -> Mapping[str, Any]:
    """What was counted."""
    content: dict[str, Any] = json.loads(COUNTED.read_text())
    return content


def passes(plan: Plan, shape: Shape) -> tuple[Pass, Pass, Pass]:
    """Forward, backward, and the layers' forward alone, which checkpointing repeats.

    Args:
        plan: of the run.
        shape: of one micro-batch, with rows as long as they are.
    """
    layers, outer = _entries(plan, shape)
    classifies = is_classification(plan.config)
    around = outer_units(shape, classifies)
    found = []
    for phase in ("forward", "backward"):
        moved, launches = 0.0, 0.0
        for stack, count in stacks_of(shape).items():
            entry = layers[stack][phase]
            moved += count * _bytes(entry, layer_units(shape, stack))
            launches += count * entry["launches"]
        entry = outer[phase]
        whole = Pass(moved + _bytes(entry, around), launches + entry["launches"])
        found += [Pass(moved, launches), whole]
    return found[1], found[3], found[0]


def _bytes(entry: Mapping[str, float], units: Mapping[str, float]) -> float:
    return max(0.0, sum(entry.get(name, 0.0) * number for name, number in units.items()))


def _entries(plan: Plan, shape: Shape) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What was counted of the layers, and of what is around them."""
    family = ALIKE.get(shape.family, shape.family)
    table = counted()[family]
    width = "cast" if shape.cast else ("wide" if shape.weights == 4 else "narrow")
    kernel = "fused" if attention_kernel(plan, shape) == "fused" else "eager"
    dropped = "dropped" if shape.dropout else "whole"
    layers = table.get(f"{width}/{kernel}/{dropped}") or table[f"{width}/{kernel}/whole"]
    task = (
        "sequence_classification"
        if is_classification(plan.config)
        else FIRST_TASK.get(family, "causal_lm")
    )
    outer = table[f"{width}/fused/whole"]
    return layers, outer.get(task) or next(v for k, v in outer.items() if k not in stacks_of(shape))
