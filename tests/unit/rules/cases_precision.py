"""Cases of rules/precision.py: the command and the device that break each rule."""

from checkpoints import save_checkpoint
from unit.rules.devices import CPU, V100

from eke.hardware import Device

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "tf32_needs_ampere": (("precision=tf32",), CPU),
    "bf16_needs_ampere": (("precision=bf16",), V100),
    "narrow_weights_need_their_compute": (("precision=fp16", "precision.weights=bfloat16"), CPU),
    "master_needs_narrow_weights": (("precision=bf16", "precision.master=on"), CPU),
    "casts_need_wide_weights": (("precision=bf16_pure", "precision.casts=per_step"), CPU),
    "casts_are_of_one_process": (
        (
            "precision=bf16",
            "precision.casts=per_step",
            "distributed=ddp",
            "distributed.num_processes=2",
        ),
        CPU,
    ),
    "small_updates_are_lost": (("precision=bf16_pure", "optimizer.lr=1e-3"), CPU),
    "evaluation_has_its_own_format": (
        ("precision=bf16_pure", "precision.evaluation=float32"),
        CPU,
    ),
    "t5_overflows_float16": (
        (
            "model=pretrained",
            "model.name_or_path={tmp}/t5",
            "task=seq2seq_lm",
            "data=synthetic",
            "precision=fp16",
        ),
        V100,
    ),
}

PREPARE = {
    "t5_overflows_float16": lambda tmp, _: save_checkpoint(tmp / "t5", "t5", tokenizer=True),
}

FIX_IS_WORDS: set[str] = set()
"""Rules whose fix is no override that a test can type."""
