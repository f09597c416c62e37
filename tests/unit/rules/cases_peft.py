"""Cases of rules/optimizer.py: the command and the device that break each rule."""

from unit.rules.devices import CPU

from eke.hardware import Device

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "adapted_layers_exist": (("peft=lora", "peft.target_modules=[q_proj,c_attn]"), CPU),
    "adapters_freeze_everything": (("peft=lora", "model.freeze=[embed_tokens]"), CPU),
    "adapters_on_random_weights": (("peft=dora",), CPU),
    "adapter_rank_saves_nothing": (("peft=lora", "peft.r=64"), CPU),
    "rslora_needs_rank": (("peft=lora", "peft.r=1", "peft.use_rslora=true"), CPU),
    "adapters_are_fused": (("peft=dora", "peft.fused=true"), CPU),
    "adapted_layers_have_biases": (("peft=lora", "peft.bias=lora_only"), CPU),
    "biases_of_four_bit_layers": (
        ("model=tiny_gpt2", "peft=qlora", "peft.bias=lora_only", "precision=bf16"), CPU,
    ),
    "frozen_weights_have_the_computed_format": (("peft=lora", "peft.base_weights=float16"), CPU),
    "four_bit_experts_are_kept": (("model=tiny_moe", "peft=qlora"), CPU),
}  # fmt: skip

FIX_IS_WORDS: set[str] = set()
"""Rules whose fix is no override that a test can type."""
