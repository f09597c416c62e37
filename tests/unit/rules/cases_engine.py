"""Cases of rules/engine.py: the command and the device that break each rule."""

from unit.rules.devices import CPU

from eke.hardware import Device

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "trainer_takes_plain_steps": (
        ("engine=trainer", "distributed=fsdp", "distributed.num_processes=2"),
        CPU,
    ),
    "extra_needs_trainer": (("trainer.extra.label_smoothing_factor=0.1",), CPU),
}

FIX_IS_WORDS: set[str] = set()
"""Rules whose fix is no override that a test can type."""
