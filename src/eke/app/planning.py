"""From one composed configuration to its plan, wherever it is to run."""

from collections.abc import Sequence
from dataclasses import replace

from eke.check import Facts, check
from eke.compose import Composed
from eke.errors import ConfigError, Problem
from eke.hardware import Device, choose
from eke.plan import Plan, make_plan
from eke.pretrained import resolve_model, resolve_tokenizer
from eke.schema import Config


def plan_for(composed: Composed, planning: bool, in_cluster: bool = False) -> Plan:
    """Check and plan one configuration.

    Args:
        composed: what is wanted.
        planning: nothing will be run.
        in_cluster: it will run on a node of a cluster, not here.

    Raises:
        ConfigError: every rule it breaks.
    """
    device, reason = choose(composed.config.hardware.option)
    if in_cluster:
        device, reason = device_of_nodes(composed.config, device)
    config = resolve_model(composed.config, composed.overrides, planning)
    config = resolve_tokenizer(config)
    refused, warned = check(Facts(config, device, planning))
    if refused:
        raise ConfigError(refused)
    warnings = [f"{p.path} = {p.value}: {p.why} ({p.fix})" for p in warned]
    return make_plan(config, composed.choices, composed.overrides, device, reason, warnings)


def without_cluster(overrides: Sequence[str]) -> list[str]:
    """What was typed for a cluster, and does nothing where there is none; as warnings."""
    return [
        f"{text} has no effect on this machine; hydra/launcher=slurm sends runs to a cluster"
        for text in overrides
        if text.lstrip("+").startswith(("resources.", "slurm.", "slurm="))
    ]


def without_pool(overrides: Sequence[str]) -> list[str]:
    """What was typed for this machine's devices, and does nothing in a cluster; as warnings."""
    return [
        f"{text} has no effect in a cluster, where SLURM hands out devices"
        for text in overrides
        if text.startswith(("launcher.cpu_slots=", "launcher.runs_per_device="))
    ]


def device_of_nodes(config: Config, found: Device) -> tuple[Device, str]:
    """The device that a cluster's nodes have, as declared, and why it is taken for granted.

    Args:
        config: what is wanted.
        found: what `hardware` means on this machine.

    Raises:
        ConfigError: nobody has said what the nodes have, and this machine has no GPU to go by.
    """
    option = config.hardware.option
    if option == "auto" and found.kind == "cpu":
        why = "this machine has no GPU to tell what the nodes have, and a run is planned for that"
        raise ConfigError(Problem("hardware", option, why, "hardware=h100   (or hardware=cpu)"))
    count = config.distributed.num_processes if found.kind == "cuda" else 1
    note = f"{found.name}: what hardware={option} says the nodes have"
    return replace(found, present=True, count=count, note=note), note
