"""Plans without Hydra's command line, for the tests of the core."""

import copy
import dataclasses
from typing import Any

from unit.models.sizes.configs import make_config

from eke.common.text import GIB
from eke.config.schema import Config
from eke.hardware import Device
from eke.plan.planner import Plan, make_plan

CPU = Device(kind="cpu", name="test cpu", memory_bytes=8 * GIB)
GPU = Device(
    kind="cuda",
    name="test gpu",
    count=4,
    memory_bytes=80 * GIB,
    capability=(9, 0),
    peak_flops=(("bfloat16", 1e15), ("float32", 6e13)),
    source="https://example.org/datasheet",
    present=False,
)

SYNTHETIC = ("data=synthetic", "data.seq_len=32", "data.num_samples=64", "train.steps=20")
"""Nothing to read, little to train."""


NEEDED = {
    "data=text": "data.path",
    "data=jsonl": "data.path",
    "data=csv": "data.path",
    "data=parquet": "data.path",
    "data=chat": "data.path",
    "data=hub": "data.name",
    "data=chat_hub": "data.name",
    "offload=nvme": "offload.path",
}
"""Option -> its key without a default."""


def config_of(*overrides: str) -> Config:
    """The configuration of these overrides, free to be changed."""
    given = {override.partition("=")[0] for override in overrides}
    missing = {NEEDED[o] for o in overrides if o in NEEDED} - given
    return copy.deepcopy(make_config(*overrides, *(f"{key}=unset" for key in sorted(missing))))


def plan_config(config: Config, device: Device = CPU, **more: Any) -> Plan:
    """The plan of a configuration."""
    choices = {
        f.name: getattr(config, f.name).option
        for f in dataclasses.fields(config)
        if hasattr(getattr(config, f.name), "option")
    }
    return make_plan(config, choices, more.pop("overrides", ()), device, "given", **more)


def plan_of(*overrides: str, device: Device = CPU, **more: Any) -> Plan:
    """The plan of some overrides."""
    return plan_config(config_of(*overrides), device, overrides=overrides, **more)


def decision(plan: Plan, key: str) -> tuple[str, str] | None:
    """Value and reason of what was decided about a key; None when nothing had to be."""
    found = [(d.value, d.reason) for d in plan.decisions if d.key == key]
    assert len(found) <= 1, f"{key} was decided twice"
    return found[0] if found else None
