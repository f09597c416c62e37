"""Cases of the rules about values that fine-tuning does not usually have (rules/training.py)."""

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import save_checkpoint
from unit.rules.devices import CPU

from eke.hardware import Device

LORA = ("model=pretrained", "model.name_or_path={tmp}/usual", "peft=lora", "data=synthetic")

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "lr_far_off": ((*LORA, "optimizer.lr=0.01"), CPU),
    "weight_decay_far_off": ((*LORA, "optimizer.weight_decay=1"), CPU),
    "max_grad_norm_far_off": ((*LORA, "train.max_grad_norm=0.001"), CPU),
    "warmup_frac_far_off": ((*LORA, "schedule.warmup_frac=0.5"), CPU),
    "samples_per_step_far_off": ((*LORA, "batch.per_device=1"), CPU),
}

FIX_IS_WORDS: set[str] = set()


def _save(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp / "usual", "llama")


PREPARE: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = dict.fromkeys(CASES, _save)
