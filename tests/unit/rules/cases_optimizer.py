"""Cases of rules/optimizer.py: the command and the device that break each rule."""

import dataclasses

from unit.rules.devices import CPU, V100

from eke.hardware import Device

NARROW = ("model.hidden_size=32", "model.intermediate_size=64", "model.num_attention_heads=2")
"""Matrices of at most 2048 numbers inside the layers."""

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "muon_needs_matrices": (("optimizer=muon", "peft=ia3"), CPU),
    "implementation_is_adamws": (
        ("optimizer=adamw_forloop", "optimizer.implementation=foreach"),
        CPU,
    ),
    "apex_needs_cuda": (("optimizer=adamw_apex_fused",), CPU),
    "torchao_needs_compiler": (("optimizer=adamw_torchao_4bit",), CPU),
    "torchao_needs_volta": (
        ("optimizer=adamw_torchao_8bit",),
        dataclasses.replace(V100, capability=(6, 0)),
    ),
    "paging_needs_cuda": (("optimizer=paged_adamw_8bit",), CPU),
    "rounding_needs_bf16_weights": (("optimizer=adamw_bf16_sr",), CPU),
    "schedule_free_has_no_schedule": (("optimizer=schedule_free",), CPU),
    "all_tensors_are_too_small_for_8_bits": (("optimizer=lion_8bit", *NARROW), CPU),
    "rank_saves_nothing": (("optimizer=galore", "optimizer.rank=100"), CPU),
}

FIX_IS_WORDS: set[str] = {"torchao_needs_compiler"}
"""Rules whose fix is no override that a test can type."""
