"""Cases of rules/compile.py: the command and the device that break each rule."""

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import save_capped
from unit.rules.cases_distributed import TWO_GPUS
from unit.rules.devices import CPU, H200, V100

from eke.hardware import Device

FUSED = "kernels=fused_linear_cross_entropy"
SPARSE = "kernels=sparse_prediction"
MASKED = ("model=tiny_bert", "task=masked_lm")

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "fused_loss_needs_vocabulary": ((FUSED, "task=sequence_classification"), CPU),
    "fused_loss_needs_known_head": (
        (FUSED, "model=pretrained", "model.name_or_path={tmp}/model"),
        CPU,
    ),
    "sparse_prediction_needs_vocabulary": ((SPARSE, "task=sequence_classification"), CPU),
    "sparse_prediction_needs_missing_labels": ((SPARSE,), CPU),
    "sparse_prediction_needs_known_head": (
        (SPARSE, "model=pretrained", "model.name_or_path={tmp}/model"),
        CPU,
    ),
    "sparse_prediction_needs_whole_batches": ((SPARSE, *MASKED, "distributed=dp"), TWO_GPUS),
    "sparse_prediction_changes_shapes": (
        (SPARSE, *MASKED, "compile=inductor", "compile.mode=reduce_overhead"),
        H200,
    ),
    "liger_needs_cuda": (("kernels=liger",), CPU),
    "liger_needs_compiler": (("kernels=liger",), V100),
    "liger_needs_known_family": (("kernels=liger", "model=tiny_gpt2"), CPU),
}

FIX_IS_WORDS: set[str] = {"liger_needs_compiler"}
"""Rules whose fix is no override that a test can type."""

PREPARE: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "sparse_prediction_needs_known_head": lambda tmp, monkeypatch: save_capped(tmp / "model"),
    "fused_loss_needs_known_head": lambda tmp, monkeypatch: save_capped(tmp / "model"),
}
"""What must be there, or not be there, for a rule to be broken."""
