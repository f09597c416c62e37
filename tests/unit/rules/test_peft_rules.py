"""What the rules about adapters rest on, and the fix that is chosen by numbers."""

from dataclasses import replace

import pytest
import torch
from unit.models.sizes.configs import make_config
from unit.rules.devices import CPU, H200
from unit.training.model.plans import hand_plan
from unit.training.model.steps import make_inputs

from eke.config.schema import Lora
from eke.models.sizes import state_bytes
from eke.rules import RuleInputs, check
from eke.rules.memory import first_that_fits, held_bytes
from eke.training.model.adapters import apply_peft
from eke.training.model.build_model import build_model

GIB = 2**30


def gpu(gib):
    """One GPU with so much memory."""
    return replace(H200, memory_bytes=gib * GIB)


def state_of(*overrides):
    config = make_config(*overrides)
    return state_bytes(config).total


@pytest.mark.parametrize(
    ("model", "memory", "fix"),
    [
        ("llama3_8b", 80, "optimizer=adafactor"),
        ("llama3_8b", 40, "peft=lora"),
        ("llama3_8b", 24, "peft=qlora"),
        ("mixtral_8x7b", 140, "peft=qlora"),
        ("mixtral_8x7b", 24, None),
    ],
)
def test_first_option_with_fitting_state_is_proposed(model, memory, fix):
    found = first_that_fits(RuleInputs(make_config(f"model={model}"), gpu(memory)))
    assert (found.words[0] if found else None) == fix
    assert state_of(f"model={model}") > memory * GIB
    if fix:
        assert state_of(f"model={model}", fix) * 1.05 <= memory * GIB


def test_processes_sharing_memory_hold_separate_copies():
    cpu = replace(CPU, memory_bytes=33 * GIB)
    config = make_config("model=llama3_8b")
    assert first_that_fits(RuleInputs(config, cpu)).words == ("peft=lora",)
    four = replace(config.distributed, option="ddp", num_processes=4)
    assert first_that_fits(RuleInputs(replace(config, distributed=four), cpu)) is None


def test_adapters_are_kept_if_the_base_model_is_frozen():
    config = make_config("model=llama3_8b", "peft=qlora")
    assert first_that_fits(RuleInputs(config, gpu(1))) is None


def test_bitsandbytes_rounds_biases_in_the_forward_pass():
    """Without its rule, a trained bias would change its format under the optimizer."""
    plan = hand_plan("model=tiny_gpt2", "peft=qlora", "peft.bias=lora_only")
    model = apply_peft(plan, build_model(plan, torch.device("cpu")))
    biases = [p for n, p in model.named_parameters() if n.endswith(".bias") and p.requires_grad]
    assert {b.dtype for b in biases} == {torch.float32}
    for module in model.modules():
        if hasattr(module, "stores_transposed"):
            module.compute_dtype = torch.bfloat16  # as precision=bf16 sets it
    model(**make_inputs(model.get_base_model()))
    assert {b.dtype for b in biases} == {torch.bfloat16}


def test_packages_of_adapters_are_named(monkeypatch):
    absent = {"bitsandbytes"}
    monkeypatch.setattr(
        "eke.rules.requirements.find_spec", lambda name: None if name in absent else object()
    )
    refused, _ = check(RuleInputs(make_config("peft=qlora"), CPU))
    assert [(p.id, p.value) for p in refused] == [("package_missing", "qlora")]
    assert refused[0].overrides == ("peft=none",)
    assert 'pip install "eke[peft,bitsandbytes]"' in refused[0].remark
    assert check(RuleInputs(make_config("peft=lora"), CPU))[0] == []


def test_cpu_holds_full_weights_before_4_bit_rounding():
    """8.03 B float32 parameters are 29.9 GiB, which a GPU's own memory never holds."""
    config = make_config("model=llama3_8b", "peft=qlora")
    cpu = replace(CPU, memory_bytes=24 * GIB)
    refused, _ = check(RuleInputs(config, cpu))
    assert [p.id for p in refused] == ["states_do_not_fit"]
    assert "29.92 GiB" in refused[0].why
    assert not check(RuleInputs(config, gpu(24), planning=True))[0]


def test_fix_leaves_memory_for_activations() -> None:
    config = make_config("model=bert_large", "task=masked_lm")
    held = held_bytes(RuleInputs(replace(config, peft=Lora(option="lora")), H200))

    def found(size):
        return first_that_fits(RuleInputs(config, replace(H200, memory_bytes=int(size)))).words

    assert found(1.04 * held) != ("peft=lora",)
    assert found(1.06 * held) == ("peft=lora",)
