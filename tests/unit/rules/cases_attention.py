"""Cases of rules/attention.py: the command and the device that break each rule."""

from pathlib import Path

import pytest
import transformers
from unit.rules.devices import CPU, H200, V100

from eke.hardware import Device

BF16 = "precision=bf16"
FLASH = "attention.backend=flash"
CUDNN = "attention.backend=cudnn"
RAGGED = ("data=synthetic", "data.lengths=uniform", "data.min_len=5")

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "backend_is_sdpas": (("attention=eager", FLASH), CPU),
    "backend_needs_cuda": ((CUDNN,), CPU),
    "cpu_flash_has_no_dropout": ((FLASH, "model.dropout=0.1"), CPU),
    "learnt_bias_needs_gradient": ((FLASH, "model=tiny_t5", "task=seq2seq_lm"), CPU),
    "flash_takes_no_mask": ((FLASH, BF16, *RAGGED, "model=tiny_bert", "task=masked_lm"), H200),
    "kernel_needs_ampere": ((FLASH, "precision=fp16"), V100),
    "kernel_needs_16_bits": ((FLASH,), H200),
    "kernel_head_is_narrow": ((FLASH, BF16, "model.head_dim=264"), H200),
    "kernel_head_is_aligned": (
        ("attention.backend=mem_efficient", BF16, "model.head_dim=12"),
        H200,
    ),
    "cudnn_dropout_in_sixteenths": ((CUDNN, BF16, "model.dropout=0.1"), H200),
    "attention_is_implemented": (
        (
            "model=pretrained",
            "model.name_or_path={tmp}/bloom",
            "attention=sdpa",
            "data=synthetic",
            "data.seq_len=16",
            "data.max_token=300",
        ),
        CPU,
    ),
    "flash_package_needs_ampere": (("attention=flash2", BF16), CPU),
    "flash_package_needs_16_bits": (("attention=flash2",), H200),
    "flash_package_without_t5": (
        ("attention=flash2", BF16, "model=tiny_t5", "task=seq2seq_lm"),
        H200,
    ),
    "flash3_has_no_dropout": (("attention=flash3", BF16, "model.dropout=0.1"), H200),
    "flash_package_packs_one_row": (
        ("attention=flash2", BF16, *RAGGED, "data.packing=on", "batch.per_device=2"),
        H200,
    ),
    "flex_needs_volta": (("attention=flex",), CPU),
    "flex_needs_compiler": (("attention=flex",), V100),
    "flex_without_gpt2": (("attention=flex", "model=tiny_gpt2"), H200),
    "flex_has_no_dropout": (("attention=flex", "model.dropout=0.1"), H200),
}

FIX_IS_WORDS: set[str] = {"flex_needs_compiler"}
"""Rules whose fix is no override that a test can type."""


def save_bloom(tmp: Path, _: pytest.MonkeyPatch) -> None:
    """A checkpoint of an architecture that transformers has without sdpa."""
    config = transformers.BloomConfig(vocab_size=320, hidden_size=32, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp / "bloom")


PREPARE = {"attention_is_implemented": save_bloom}
"""Rule -> what its surroundings need."""
