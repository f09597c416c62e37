"""For every rule a command and a device that break it, cases.txt; and the surroundings it needs."""

import dataclasses
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from checkpoints import save_capped, save_checkpoint
from unit.rules.devices import BY_NAME, H200

from eke.config.compose import compose, is_set
from eke.hardware import Device
from eke.models.checkpoints import resolve_model
from eke.rules import RuleInputs


def _read() -> dict[str, tuple[tuple[str, ...], Device]]:
    lines = Path(__file__).with_name("cases.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    assert len({rule for rule, *_ in rows}) == len(rows), "each rule once"
    return {rule: (tuple(overrides), BY_NAME[device]) for rule, device, *overrides in rows}


CASES = _read()

RAGGED = ("data=synthetic", "data.lengths=uniform", "data.min_len=5")


def save_bloom(folder: Path) -> None:
    """A checkpoint of an architecture that transformers has without sdpa."""
    config = transformers.BloomConfig(vocab_size=320, hidden_size=32, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(folder)


CHECKPOINTS = {
    "bytes_on_checkpoint": lambda tmp: save_checkpoint(tmp / "model"),
    "t5_overflows_float16": lambda tmp: save_checkpoint(tmp / "t5", "t5", tokenizer=True),
    "sparse_prediction_needs_known_head": lambda tmp: save_capped(tmp / "model"),
    "fused_loss_needs_known_head": lambda tmp: save_capped(tmp / "model"),
    "attention_is_implemented": lambda tmp: save_bloom(tmp / "bloom"),
    **{
        rule: lambda tmp: save_checkpoint(tmp / "usual", "llama")
        for rule in CASES
        if rule.endswith("_far_off")
    },
}
"""Rule -> what writes the checkpoint of its case."""

SMALL_DISK = SimpleNamespace(
    disk_usage=lambda path: SimpleNamespace(free=5), which=shutil.which
)  # fmt: skip
FAKES: dict[str, tuple[str, Any]] = {
    "package_missing": ("requirements.find_spec", lambda name: None),
    "datasets_missing": ("data.find_spec", lambda name: None),
    "float8_needs_torchao": ("precision.find_spec", lambda name: None),
    "runs_has_space": ("training.MIN_FREE_BYTES", 2**62),
    "more_workers_than_cores": ("training.usable_cores", lambda: 4),
    "zero3_recomputes_frozen_weights": ("deepspeed.version", lambda name: "0.19.2"),
    "nvme_folder_is_a_disk": ("deepspeed.file_system", lambda path: "tmpfs"),
    "nvme_folder_is_local": ("deepspeed.file_system", lambda path: "nfs4"),
    "nvme_has_space": ("deepspeed.shutil", SMALL_DISK),
    "nvme_buffers_are_locked": ("deepspeed._lockable_bytes", lambda: 65536),
    "nvme_needs_libaio": ("deepspeed.has_libaio_header", lambda flags: False),
}
"""Rule -> what in eke.rules is replaced, and by what."""


def prepare(rule: str, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the files and the state of the machine that this rule is about."""
    (tmp / "a.txt").write_text("text " * 1000)
    (tmp / "secret.txt").write_text("text")
    CHECKPOINTS.get(rule, lambda tmp: None)(tmp)
    if rule.startswith("nvme_"):  # as if there were a disk, libaio and no limit
        monkeypatch.setattr("eke.rules.deepspeed.has_libaio_header", lambda flags: True)
        monkeypatch.setattr("eke.rules.deepspeed.file_system", lambda path: "ext4")
        monkeypatch.setattr("eke.rules.deepspeed._lockable_bytes", lambda: None)
    if rule in FAKES:
        name, value = FAKES[rule]
        monkeypatch.setattr(f"eke.rules.{name}", value)
    if rule == "text_readable":
        # root may read everything, so the answer of the system is replaced, not the file's mode
        refuse, true_access = str(tmp / "secret.txt"), os.access
        monkeypatch.setattr(
            os, "access", lambda p, mode, **k: str(p) != refuse and true_access(p, mode, **k)
        )
    if rule == "online_needs_key":
        monkeypatch.setenv("HOME", str(tmp))
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if rule.endswith("_needs_compiler"):
        monkeypatch.setattr("shutil.which", lambda name: None)
        monkeypatch.delenv("CC", raising=False)


def facts_of(case: tuple[tuple[str, ...], Device], tmp: Path) -> RuleInputs:
    overrides, device = case
    composed = compose([o.format(tmp=tmp) for o in overrides])
    config = resolve_model(composed.config)
    present = dataclasses.replace(device, present=device is not H200)
    return RuleInputs(config, present, is_set=partial(is_set, composed))
