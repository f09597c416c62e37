"""states_do_not_fit where the state may be shared out: what it counts, and what it proposes."""

import dataclasses

import pytest
from unit.rules.devices import CPU

from eke.config.compose import compose
from eke.hardware import DEVICES
from eke.rules import RuleInputs, check

EIGHT = dataclasses.replace(DEVICES["h100"], count=8, present=True)
RULE = "states_do_not_fit"


def problem_of(device, *overrides):
    """What the rule says of these overrides; None when it has nothing to say."""
    refused, _ = check(RuleInputs(compose(list(overrides)).config, device))
    return next((p for p in refused if p.id == RULE), None)


def test_several_gpus_are_proposed_for_a_large_model() -> None:
    """8.03 B float32 parameters with AdamW are 120 GiB; an eighth of that fits into 80 GiB."""
    problem = problem_of(EIGHT, "model=llama3_8b")
    assert str(problem.fix) == "distributed=fsdp distributed.num_processes=8"
    assert problem_of(EIGHT, "model=llama3_8b", *problem.overrides) is None


@pytest.mark.parametrize(
    ("device", "overrides"),
    [
        (dataclasses.replace(EIGHT, count=1), ()),
        (dataclasses.replace(EIGHT, memory_bytes=2**34), ("optimizer=adafactor",)),
        (EIGHT, ("batch.per_device=3", "batch.target=12")),
    ],
    ids=["one GPU", "an optimizer that cannot", "a target that eight do not divide"],
)
def test_several_gpus_are_not_proposed_without_effect(device, overrides) -> None:
    problem = problem_of(device, "model=llama3_8b", *overrides)
    assert "fsdp" not in str(problem.fix)


def test_oversized_shards_are_rejected() -> None:
    """46.7 B float32 parameters with AdamW are 696 GiB, of which each of eight holds 87."""
    typed = ("model=mixtral_8x7b", "distributed=fsdp", "distributed.num_processes=8")
    problem = problem_of(EIGHT, *typed)
    assert "86.99 GiB" in problem.why
    assert str(problem.fix).startswith("peft=lora")
    assert problem_of(EIGHT, *typed, *problem.overrides) is None


def test_sharded_build_needs_no_full_weights() -> None:
    """1.24 B parameters in 8 parts are 18.4 GiB; whole weights in each process were 37."""
    memory = dataclasses.replace(CPU, memory_bytes=21 * 2**30)
    typed = ("model=llama_1b", "distributed=fsdp", "distributed.num_processes=8")
    assert problem_of(memory, *typed) is None


@pytest.mark.parametrize(
    ("gib", "strategy", "fix"),
    [(20, "ddp", "distributed=none"), (40, "ddp", "distributed.num_processes=2")],
)
def test_cpu_processes_share_memory(gib, strategy, fix) -> None:
    """1.24 B float32 parameters are 4.6 GiB, and 18.4 GiB with gradients and AdamW's moments."""
    memory = dataclasses.replace(CPU, memory_bytes=gib * 2**30)
    typed = ("model=llama_1b", f"distributed={strategy}", "distributed.num_processes=8")
    problem = problem_of(memory, *typed)
    assert str(problem.fix) == fix
    kept = [o for o in typed if o.split("=")[0] != fix.split("=")[0]]
    if fix == "distributed=none":
        kept = ["model=llama_1b"]
    assert problem_of(memory, *kept, fix) is None
