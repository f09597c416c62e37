"""Cases of rules/deepspeed.py: the command and the device that break each rule."""

from unit.rules.devices import CPU, V100

from eke.hardware import Device

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "zero_keeps_masters": (
        ("distributed=zero2", "precision=bf16_pure", "precision.master=off"),
        CPU,
    ),
    "zero_rounds_adapters": (("distributed=zero2", "precision=bf16_pure", "peft=lora"), CPU),
    "zero3_recomputes_frozen_weights": (
        ("distributed=zero3", "peft=lora", "memory=checkpointing"),
        CPU,
    ),
    "zero_needs_elementwise_optimizer": (("distributed=zero2", "optimizer=adafactor"), CPU),
    "zero_with_compile": (("distributed=zero1", "compile=aot_eager"), CPU),
    "zero_of_one": (("distributed=zero3", "distributed.num_processes=1"), CPU),
    "deepspeed_not_needed": (("distributed=zero2", "distributed.num_processes=1"), V100),
    "zero_knows_no_embeddings": (("distributed=zero2", "optimizer=adamw_8bit"), CPU),
    "ds_config_without_zero": (("distributed.deepspeed_config=ds.json",), CPU),
    "cpu_adam_needs_compiler": (("distributed=zero2", "offload=optimizer_cpu"), CPU),
}

FIX_IS_WORDS: set[str] = set()
"""Rules whose fix is no override that a test can type."""
