"""Formats that are really computed in, on a CPU too."""

import pytest
import torch
from torch import nn
from unit.plan.cases import CPU, GPU, SYNTHETIC, plan_of

from eke.build.precision import BUILDERS, build_formats
from eke.schema import Compute

DEVICE = torch.device("cpu")


def formats(option, device=CPU):
    return build_formats(plan_of(*SYNTHETIC, f"precision={option}", device=device), DEVICE)


def test_options_are_builders() -> None:
    assert set(BUILDERS) == set(Compute)


@pytest.mark.parametrize(
    ("option", "dtype", "scaled"),
    [
        ("fp32", torch.float32, False),
        ("tf32", torch.float32, False),
        ("bf16", torch.bfloat16, False),
        ("fp16", torch.float16, True),
    ],
)
def test_a_product_has_the_format_that_was_asked_for(option, dtype, scaled) -> None:
    made = formats(option)
    layer = nn.Linear(8, 8)
    for _ in range(2):  # a fresh context each time
        with made.autocast():
            y = layer(torch.randn(2, 8))
        assert y.dtype == dtype
    assert layer.weight.dtype == torch.float32, "the weights stay in float32"
    assert (made.scaler is not None) == scaled
    assert not torch.is_autocast_enabled("cpu"), "and nothing stays switched on"
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_sixteen_bits_round() -> None:
    """Products of values that need more mantissa than the format has."""
    x = torch.full((1, 1), 1 + 2**-9)
    for option, exact in (("fp32", True), ("fp16", True), ("bf16", False)):
        with formats(option).autocast():
            y = nn.functional.linear(x, torch.ones(1, 1))
        assert (y.float().item() == x.item()) == exact, option


def test_the_loss_scale_keeps_small_gradients_on_a_cpu() -> None:
    """1e-8 is below float16's smallest number, 6e-8; scaled by 2^16 it is not."""
    made = formats("fp16")
    weight = torch.ones(1, requires_grad=True)

    def gradient(scale):
        weight.grad = None
        with made.autocast():
            loss = (weight.half() * torch.tensor([1e-4], dtype=torch.float16)).float() * 1e-4
        (scale(loss) if scale else loss).sum().backward()
        return weight.grad.item()

    assert gradient(None) == 0.0
    assert gradient(made.scaler.scale) / made.scaler.get_scale() == pytest.approx(1e-8, rel=0.05)


def test_a_step_that_overflows_is_skipped_and_the_scale_halved() -> None:
    made = formats("fp16")
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    made.scaler.scale((weight * torch.inf).sum()).backward()
    before = made.scaler.get_scale()
    made.scaler.step(optimizer)
    made.scaler.update()
    assert weight.item() == 1.0
    assert made.scaler.get_scale() == before / 2


@pytest.mark.parametrize("option", ["fp32", "tf32"])
def test_a_cpu_leaves_the_global_flags_alone(option) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    formats(option, device=GPU)
    assert torch.backends.cuda.matmul.allow_tf32 == before
