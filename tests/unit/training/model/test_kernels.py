"""Kernels that replace a model's modules, with a stand-in for liger-kernel: it needs triton."""

import importlib
import sys
import types
from collections.abc import Callable

import pytest
import torch
from unit.training.model.plans import hand_plan
from unit.training.model.rotation import rotate_in_place
from unit.training.model.steps import step

from eke.common.errors import RunError
from eke.training.model.adapters import apply_peft
from eke.training.model.build_model import build_model
from eke.training.model.checkpointing import apply_checkpointing
from eke.training.model.loss import apply_kernels, replaced_modules

CPU = torch.device("cpu")


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    """Installs a function as liger-kernel 0.8.5's `_apply_liger_kernel_to_instance`."""

    def install(patch: Callable[..., None]) -> None:
        package, module = (
            types.ModuleType("liger_kernel"),
            types.ModuleType("liger_kernel.transformers"),
        )
        module._apply_liger_kernel_to_instance = patch
        monkeypatch.setitem(sys.modules, "liger_kernel", package)
        monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)

    return install


def bind_forward(module: torch.nn.Module) -> None:
    """Give a module a forward pass of Liger's."""

    def forward(self, hidden):
        return hidden

    forward.__module__ = "liger_kernel.transformers.rms_norm"
    vars(module)["forward"] = types.MethodType(forward, module)


@pytest.mark.parametrize(("model", "swiglu"), [("tiny", True), ("tiny_moe", False)])
def test_liger_replaces_modules_but_not_loss_or_experts(liger, model, swiglu) -> None:
    asked = {}

    def bind_norms(model, **kwargs) -> None:
        asked.update(kwargs)
        for layer in model.model.layers:
            bind_forward(layer.input_layernorm)

    liger(bind_norms)
    plan = hand_plan("kernels=liger", f"model={model}")
    model = build_model(plan, CPU)
    assert replaced_modules(model) == 0
    apply_kernels(plan, model)
    assert replaced_modules(model) == len(model.model.layers)
    losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    assert asked == {**losses, "swiglu": swiglu}


@pytest.mark.parametrize("peft", ["lora", "ia3"])
def test_layers_below_adapters_are_found(liger, peft) -> None:
    """Where liger-kernel 0.8.5 looks (monkey_patch.py, apply_liger_kernel_to_llama)."""
    found = []

    def look(model, **kwargs) -> None:
        base = getattr(model, model.base_model_prefix, model)
        found.extend((base.norm, *base.layers))
        bind_forward(base.norm)

    liger(look)
    plan = hand_plan("kernels=liger", f"peft={peft}")
    model = apply_peft(plan, build_model(plan, CPU))
    apply_kernels(plan, model)
    assert len(found) == 1 + plan.config.model.num_hidden_layers


def test_liger_without_replacements_is_an_error(liger) -> None:
    liger(lambda model, **kwargs: None)
    plan = hand_plan("kernels=liger")
    with pytest.raises(RunError, match=r"LlamaForCausalLM\n  -> kernels=none"):
        apply_kernels(plan, build_model(plan, CPU))


def _of_family(family: str) -> torch.nn.Module:
    """A small model with weights that are the same each time."""
    import transformers

    sizes = {
        "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


@pytest.mark.parametrize("memory", ["checkpointing", "checkpointing_selective"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_in_place_rotation_breaks_selective_checkpointing(family, memory, monkeypatch) -> None:
    """Only Qwen3 has a norm between the projections that are kept and their rotation."""
    plain_loss, plain = step(_of_family(family))
    name = family.lower()
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", rotate_in_place)
    model = _of_family(family)
    apply_checkpointing(hand_plan(f"memory={memory}"), model)
    loss, found = step(model)
    assert torch.allclose(loss, plain_loss)
    right = all(torch.allclose(found[n], plain[n], rtol=1e-3, atol=1e-7) for n in plain)
    assert right is (memory == "checkpointing" or family == "Qwen3")
