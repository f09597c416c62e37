"""Kernels that replace a model's modules, with a stand-in for liger-kernel: it needs triton."""

import sys
import types
from collections.abc import Callable

import pytest
import torch
from unit.build.plans import hand_plan

from eke.build.kernels import apply_kernels, replaced_modules
from eke.build.model import build_model
from eke.errors import RunError

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


def test_replaced_modules_are_counted_and_the_loss_is_left_alone(liger) -> None:
    asked = {}

    def bind_norms(model, **kwargs) -> None:
        asked.update(kwargs)

        def forward(self, hidden):
            return hidden

        forward.__module__ = "liger_kernel.transformers.rms_norm"
        for layer in model.model.layers:
            layer.input_layernorm.__dict__["forward"] = types.MethodType(
                forward, layer.input_layernorm
            )

    liger(bind_norms)
    plan = hand_plan("kernels=liger")
    model = build_model(plan, CPU)
    assert replaced_modules(model) == 0
    apply_kernels(plan, model)
    assert replaced_modules(model) == len(model.model.layers)
    assert asked == {"cross_entropy": False, "fused_linear_cross_entropy": False}


def test_liger_that_replaces_nothing_is_an_error(liger) -> None:
    liger(lambda model, **kwargs: None)
    plan = hand_plan("kernels=liger")
    with pytest.raises(RunError, match="replaces nothing in LlamaForCausalLM"):
        apply_kernels(plan, build_model(plan, CPU))


def test_none_replaces_nothing() -> None:
    plan = hand_plan()
    model = build_model(plan, CPU)
    before = list(model.modules())
    apply_kernels(plan, model)
    assert list(model.modules()) == before
