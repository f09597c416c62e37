"""Cases of rules/precision.py: the command and the device that break each rule."""

from unit.rules.devices import CPU, H200, V100

from eke.hardware import Device

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "float8_needs_torchao": (("precision=fp8",), CPU),
    "float8_needs_ada": (("precision=fp16", "precision.float8=tensorwise"), V100),
    "rowwise_needs_bf16": (("precision=fp32", "precision.float8=rowwise"), H200),
    "gpt2_has_no_linear_layers": (("precision=fp8", "model=tiny_gpt2"), CPU),
    "float8_width_is_aligned": (("precision=fp8", "model.hidden_size=72"), CPU),
    "float8_feed_forward_is_aligned": (("precision=fp8", "model.intermediate_size=100"), CPU),
    "float8_is_emulated": (("precision=fp8",), CPU),
    "float8_needs_compile": (("precision=fp8", "compile=none"), H200),
    "float8_in_narrow_layers": (("precision=fp8",), H200),
}

PREPARE = {
    "float8_needs_torchao": lambda _, patch: patch.setattr(
        "eke.rules.precision.find_spec", lambda name: None
    ),
}

FIX_IS_WORDS: set[str] = {"float8_needs_torchao"}
"""Rules whose fix is no override that a test can type."""
