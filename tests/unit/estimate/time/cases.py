"""Plans for the time model's tests."""

from unit.plan.cases import plan_of

from eke.hardware import DEVICES, Device
from eke.plan.planner import Plan

A100 = DEVICES["a100_80"]
V100 = DEVICES["v100_16"]
CPU = Device(kind="cpu", name="a processor of the tests", memory_bytes=2**34)

SMALL = ("data=synthetic", "data.seq_len=128", "data.num_samples=64", "batch.per_device=8",
         "model.num_hidden_layers=4", "model.hidden_size=256", "model.num_attention_heads=4",
         "model.intermediate_size=1024")  # fmt: skip


def small(*overrides: str, device: Device = A100) -> Plan:
    """A small Llama, or whatever is typed."""
    return plan_of(*SMALL, *overrides, device=device)


def large(*overrides: str, device: Device = A100) -> Plan:
    """BERT-large as the guides have it, which keeps any device busy."""
    return plan_of("model=bert_large", "task=sequence_classification", "data=synthetic",
                   "data.seq_len=512", "batch.per_device=4", *overrides, device=device)  # fmt: skip
