"""Cases of rules/deepspeed.py: the command and the device that break each rule."""

from unit.rules.devices import CPU

from eke.hardware import Device

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "offload_needs_zero": (("offload=optimizer_cpu",), CPU),
    "offload_needs_zero3": (("distributed=zero2", "offload=params_cpu"), CPU),
    "offload_on_cpu": (("distributed=zero2", "offload=optimizer_cpu"), CPU),
}

FIX_IS_WORDS: set[str] = set()
"""Rules whose fix is no override that a test can type."""
