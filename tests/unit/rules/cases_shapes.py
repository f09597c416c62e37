"""Cases of rules/model.py: the command and the device that break each rule."""

from unit.rules.devices import H200

from eke.hardware import DEVICES, Device

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "tensor_cores_like_vocab_size": (("precision=bf16", "model.vocab_size=50257"), H200),
    "tensor_cores_like_hidden_size": (
        ("precision=tf32", "model.hidden_size=36"),
        DEVICES["a100_40"],
    ),
    "tensor_cores_like_intermediate_size": (
        ("precision=fp16", "model.intermediate_size=1000"),
        DEVICES["a100_80"],
    ),
    "tensor_cores_like_token_count": (
        ("precision=fp16", "batch.per_device=13", "data.seq_len=127"),
        DEVICES["v100_16"],
    ),
}

FIX_IS_WORDS: set[str] = set()
"""Rules whose fix is no override that a test can type."""
