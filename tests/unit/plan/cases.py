"""Plans without Hydra's command line, for the tests of the core."""

import dataclasses
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
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


def config_of(*overrides: str) -> Config:
    """The configuration of these overrides, free to be changed.

    Hydra takes a fifth of a second, so it only chooses options, and only once for each choice.
    """
    groups = [o for o in overrides if "." not in o.split("=")[0]]
    if {"data=text", "data=jsonl", "data=csv", "data=parquet"} & set(groups):
        groups.append("data.path=unset")
    if "data=hub" in groups:
        groups.append("data.name=unset")
    if "offload=nvme" in groups:
        groups.append("offload.path=unset")
    tree = OmegaConf.structured(make_config(*groups))
    for override in OverridesParser.create().parse_overrides(
        [o for o in overrides if o not in groups]
    ):
        OmegaConf.update(tree, override.key_or_group, override.value())
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    return config


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
