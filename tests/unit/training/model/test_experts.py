"""Experts under autocast: the product that PyTorch's autocast does not know."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from unit.training.model.plans import hand_plan
from unit.training.model.steps import make_inputs, step

from eke.hardware import Device
from eke.rules import Facts, check
from eke.training.model.attention_kernels import KernelProbe
from eke.training.model.build_model import build_model
from eke.training.model.unused import cast_experts, has_experts

CPU = torch.device("cpu")


def build(*overrides: str) -> torch.nn.Module:
    return build_model(hand_plan("model=tiny_moe", *overrides), CPU)


def test_only_a_mixture_has_experts() -> None:
    assert has_experts(build())
    assert not has_experts(build_model(hand_plan("model=tiny"), CPU))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("fallback", [False, True], ids=["PyTorch's", "transformers'"])
def test_experts_multiply_in_the_format_of_autocast(dtype, fallback, monkeypatch) -> None:
    """And only there: forward and backward, by either of the two products transformers has."""
    from transformers.integrations import moe

    if fallback:
        monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    model = build()
    context = torch.autocast("cpu", dtype) if dtype else nullcontext()
    with KernelProbe() as probe:
        with context:
            loss = model(**make_inputs(model)).logits.float().square().mean()
        loss.backward()
    wanted = str(dtype or torch.float32).removeprefix("torch.")
    assert probe.seen().matmul_dtypes == (wanted,)
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())


def test_the_loss_is_that_of_float32_but_for_rounding() -> None:
    loss, gradients = step(build())
    with torch.autocast("cpu", torch.bfloat16):
        narrow, found = step(build())
    # As for bf16 in tests/equivalence/test_same_mathematics.py.
    assert narrow.item() == pytest.approx(loss.item(), rel=10 * 2**-9)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert found[name].dtype is torch.float32
    assert (found[name] - gradients[name]).norm() < 0.05 * gradients[name].norm()


@pytest.mark.parametrize(("width", "fits"), [(36, False), (40, True)])
def test_rows_of_cast_experts_must_be_whole_too(width, fits) -> None:
    """Four float32 numbers fill 16 bytes, of 16 bits it takes eight; 36 is no multiple of these."""
    sizes = ("model=tiny_moe", f"model.intermediate_size={width}")
    for precision in ("fp32", "bf16"):
        config = hand_plan(*sizes, f"precision={precision}").config
        refused, _ = check(Facts(config, Device("cpu", "cpu", memory_bytes=2**34)))
        found = {problem.id for problem in refused}
        expected = not fits and precision == "bf16"
        assert ("experts_intermediate_size_is_aligned" in found) is expected
    with torch.autocast("cpu", torch.bfloat16), nullcontext() if fits else _misaligned():
        step(build(*sizes[1:]))


def _misaligned() -> AbstractContextManager[object]:
    return pytest.raises(RuntimeError, match="multiple of 16 bytes")


def test_it_is_replaced_once() -> None:
    from transformers.integrations import moe

    model = build()
    replaced = moe._grouped_mm
    assert replaced.__wrapped__.__module__ == moe.__name__
    cast_experts(model)
    assert moe._grouped_mm is replaced


def test_a_version_without_that_product_is_left_alone(monkeypatch) -> None:
    from transformers.integrations import moe

    model = build()
    monkeypatch.delattr(moe, "_grouped_mm")
    cast_experts(model)
    assert not hasattr(moe, "_grouped_mm")
