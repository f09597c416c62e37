"""Formats that are really computed in, on a CPU too."""

import warnings

import pytest
import torch
from torch import nn
from unit.models.sizes.configs import FAMILY_CASES
from unit.plan.cases import CPU, GPU, SYNTHETIC, plan_of

from eke.training.model.build_model import build_model
from eke.training.model.model_checks import HEADS, drawn_in_float32
from eke.training.model.number_formats import build_formats, set_tf32

DEVICE = torch.device("cpu")


def formats(option, device=CPU):
    return build_formats(plan_of(*SYNTHETIC, f"precision={option}", device=device), DEVICE)


@pytest.mark.parametrize(
    ("option", "dtype", "scaled"),
    [
        ("fp32", torch.float32, False),
        ("tf32", torch.float32, False),
        ("bf16", torch.bfloat16, False),
        ("fp16", torch.float16, True),
        ("bf16_pure", torch.float32, False),
    ],
)
def test_autocast_products_have_the_configured_format(option, dtype, scaled) -> None:
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


def test_loss_scale_keeps_small_gradients_on_a_cpu() -> None:
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


@pytest.mark.parametrize("option", ["fp32", "tf32"])
def test_cpu_run_keeps_global_tf32_flags(option) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    formats(option, device=GPU)
    assert torch.backends.cuda.matmul.allow_tf32 == before


@pytest.mark.parametrize(("option", "task"), FAMILY_CASES, ids=str)
def test_16_bit_weights_are_rounded_float32_weights(option, task) -> None:
    """So that runs in several formats start from the same model."""
    assert task in HEADS
    wide, narrow = (
        build_model(plan_of(f"model={option}", f"task={task}", *SYNTHETIC, p), DEVICE)
        for p in ("precision=fp32", "precision=bf16_pure")
    )
    other = dict(narrow.named_parameters())
    for name, weight in wide.named_parameters():
        assert other[name].dtype == torch.bfloat16
        assert torch.equal(weight.bfloat16(), other[name]), name


@pytest.mark.parametrize(
    "draw", [torch.nn.init.normal_, torch.nn.init.uniform_], ids=["normal", "uniform"]
)
@pytest.mark.parametrize("size", [5, 16, 1000])
def test_random_numbers_match_float32(draw, size) -> None:
    """PyTorch's own draws differ in a tensor's last numbers, or in all of them."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        with drawn_in_float32(dtype):
            found[dtype] = [draw(torch.empty(size, dtype=dtype)) for _ in range(2)]
    for wide, narrow in zip(*found.values(), strict=True):
        assert narrow.dtype == torch.bfloat16
        assert torch.equal(wide.bfloat16(), narrow)


@pytest.mark.parametrize(
    ("option", "evaluation", "dtype"),
    [
        ("fp32", "same", torch.float32),
        ("bf16", "same", torch.bfloat16),
        ("fp32", "bfloat16", torch.bfloat16),
        ("fp32", "float16", torch.float16),
        ("bf16", "float32", torch.float32),
        ("fp16", "bfloat16", torch.bfloat16),
    ],
)
def test_evaluation_uses_its_configured_format(option, evaluation, dtype) -> None:
    overrides = (f"precision={option}", f"precision.evaluation={evaluation}")
    made = build_formats(plan_of(*SYNTHETIC, *overrides), DEVICE)
    with made.eval_autocast():
        assert nn.Linear(8, 8)(torch.randn(2, 8)).dtype == dtype


@pytest.fixture
def tf32_flags():
    """torch's flags, put back as they were."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def test_autocast_copies_are_not_cached_in_evaluation() -> None:
    made = build_formats(plan_of(*SYNTHETIC, "precision=bf16"), DEVICE)
    for context, kept in ((made.autocast, True), (made.eval_autocast, False)):
        with context():
            assert torch.is_autocast_cache_enabled() is kept


def test_tf32_is_set_through_all_apis_without_a_warning(tf32_flags) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for on in (True, False, True):
            set_tf32(on)
            assert torch.backends.cuda.matmul.allow_tf32 is on
            assert torch.backends.cudnn.allow_tf32 is on
            # inductor reads this one for the key of its cache, flex attention for its kernels
            assert torch.get_float32_matmul_precision() == ("high" if on else "highest")
            if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch 2.9
                expected = "tf32" if on else "ieee"
                assert torch.backends.cuda.matmul.fp32_precision == expected
