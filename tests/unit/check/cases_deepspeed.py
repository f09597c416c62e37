"""Cases of check/rules_deepspeed.py: the command and the device that break each rule."""

from unit.check.devices import CPU, V100

from eke.hardware import Device

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "zero_needs_float32_weights": (("distributed=zero2", "precision=bf16_pure"), CPU),
    "zero_without_float8": (("distributed=zero2", "precision=fp8"), CPU),
    "zero_evaluates_as_it_trains": (("distributed=zero2", "precision.evaluation=bfloat16"), CPU),
    "zero_shares_out_all_weights": (("distributed=zero3", "peft=lora"), CPU),
    "zero_needs_elementwise_optimizer": (("distributed=zero2", "optimizer=adafactor"), CPU),
    "zero_with_compile": (("distributed=zero1", "compile=aot_eager"), CPU),
    "zero_of_one": (("distributed=zero3", "distributed.num_processes=1"), CPU),
    "deepspeed_not_needed": (("distributed=zero2", "distributed.num_processes=1"), V100),
    "ds_config_without_zero": (("distributed.deepspeed_config=ds.json",), CPU),
    "cpu_adam_needs_compiler": (("distributed=zero2", "offload=optimizer_cpu"), CPU),
}

FIX_IS_WORDS: set[str] = set()
"""Rules whose fix is no override that a test can type."""
