"""Trainings in this process, on the device that tests/gpu is to run on.

`EKE_GPU_TESTS_ON=cpu` takes the CPU and smaller sizes: it shows that the tests themselves are not
broken, and says nothing about a GPU. What a rule says this machine cannot do, or what would do
nothing on it, is skipped with the rule's words.
"""

import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from equivalence_compare import Curve
from support import last_wins
from trained import record_of, steps_of, train_job

from eke.common.errors import ConfigError
from eke.config.compose import compose
from eke.plan.planner import Plan
from eke.rules import RULES, RuleInputs, Severity, check
from eke.workflows.planning import plan_for

ON = os.environ.get("EKE_GPU_TESTS_ON", "cuda")

BASE = (
    "tracker=none",
    "experiment=smoke",
    "model.dropout=0.0",
    "data=synthetic",
    "data.seq_len=128",
    "batch.per_device=4",
    "train.steps=6",
    "train.save_final=false",
)
"""The default model, 4 layers 128 wide; a second or less."""

LACKING = frozenset(
    {
        "apex_needs_cuda",
        "backend_needs_cuda",
        "batch_does_not_fit",
        "bf16_needs_ampere",
        "cpu_adam_needs_compiler",
        "cudagraphs_need_cuda",
        "dp_needs_two_gpus",
        "flash_package_needs_ampere",
        "flex_needs_compiler",
        "flex_needs_volta",
        "float8_needs_ada",
        "float8_needs_torchao",
        "inductor_needs_compiler",
        "inductor_needs_volta",
        "kernel_needs_ampere",
        "liger_needs_compiler",
        "liger_needs_cuda",
        "more_processes_than_devices",
        "package_missing",
        "states_do_not_fit",
        "tf32_needs_ampere",
        "torchao_needs_compiler",
        "torchao_needs_volta",
    }
)
"""Rules about what a machine lacks. A refusal by any other one fails the test."""

IDLE = frozenset(rule.id for rule in RULES if rule.verdict is Severity.no_effect)

Size = TypeVar("Size")


def sized(on_gpu: Size, on_cpu: Size) -> Size:
    """The size for the device at hand."""
    return on_gpu if ON == "cuda" else on_cpu


@dataclass(frozen=True)
class Trained:
    """What is left of a training that is over; the device's memory is free again."""

    plan: Plan
    curve: Curve
    """Loss and gradient norm of each step."""
    effective: dict[str, Any]
    peak_bytes: int
    """Of the tensor allocator, above what this process held before."""
    idle: tuple[str, ...]
    """What a rule says does nothing on this device."""

    @property
    def losses(self) -> list[float]:
        """Of each step."""
        return [loss for loss, _ in self.curve]

    def needs_effect(self) -> None:
        """Skip the rest where an option does nothing on this device, with the rule's words."""
        if self.idle:
            pytest.skip("; ".join(self.idle))


def plan_here(*overrides: str) -> Plan:
    """Checked and planned; skips the test with the rule's words where this machine lacks a thing.

    Raises:
        ConfigError: refused for another reason.
    """
    hardware = "hardware=cpu" if ON == "cpu" else "hardware=auto"
    try:
        return plan_for(compose([*last_wins(*BASE, *overrides), hardware]), planning=False)
    except ConfigError as error:
        if {problem.id for problem in error.problems} <= LACKING:
            pytest.skip(error.short())
        raise


def train_here(folder: Path, *overrides: str) -> Trained:
    """Train, look, and free everything."""
    import torch

    plan = plan_here(*overrides)
    before = 0
    if plan.device.kind == "cuda":
        free_memory()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    job = train_job(plan, folder / plan.run_id)
    record, steps = record_of(job), steps_of(job)
    assert record.memory.measured is not None
    peak = record.memory.measured.peak_allocated_bytes
    assert peak is not None
    _, warned = check(RuleInputs(plan.config, plan.device))
    idle = tuple(f"{p.key} = {p.value} {p.why}" for p in warned if p.id in IDLE)
    without_effect = [warning for warning in record.warnings if "had no effect" in warning]
    assert idle or not without_effect, "no rule had foreseen it"
    del job
    free_memory()
    return Trained(plan, list(steps.values()), record.effective, peak - before, idle)


def free_memory() -> None:
    """Drop what nobody refers to any more, from Python and from the device's cache."""
    import torch

    gc.collect()
    if ON == "cuda":
        torch.cuda.synchronize()  # an error of the kernels before is theirs, not the next test's
        torch.cuda.empty_cache()
