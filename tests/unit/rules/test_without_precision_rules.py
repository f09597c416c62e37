"""Without the rules about number formats: what really goes wrong."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from unit.plan.cases import plan_of
from unit.rules.without import LIGHT, exchanging, light_plan, trained
from unit.training.model.plans import hand_plan
from unit.training.model.steps import make_inputs

from eke.hardware import DEVICES
from eke.rules import RuleInputs
from eke.rules.precision import _unit
from eke.training.model.adapters import convert_linear_layers, float8_layers
from eke.training.model.attention_kernels import KernelProbe
from eke.training.model.build_model import build_model
from eke.training.model.number_formats import NarrowCopies, build_formats

CPU = torch.device("cpu")
V100, ADA = SimpleNamespace(major=7, minor=0), SimpleNamespace(major=8, minor=9)


@pytest.fixture
def pretend(monkeypatch):
    """Let torch see a GPU of this generation."""

    def see(device: SimpleNamespace) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: device)
        capability = (device.major, device.minor)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)

    return see


@pytest.mark.parametrize(("device", "supported"), [(V100, False), (ADA, True)], ids=["V100", "Ada"])
def test_pytorch_requires_the_same_generation_for_bf16_and_tf32(device, supported, pretend) -> None:
    pretend(device)
    assert torch.cuda.is_bf16_supported(including_emulation=False) is supported
    assert torch.cuda.is_tf32_supported() is supported


def test_16_bit_weights_multiply_in_their_own_format(tmp_path) -> None:
    with pytest.warns(UserWarning, match="Disabling autocast"):
        job = trained(tmp_path, "precision=fp32", "precision.weights=bfloat16")
    assert job.effective["matmul_dtypes"] == ["bfloat16"]


def test_ranks_do_not_reduce_gradients_of_copies() -> None:
    exchanged, model = [], nn.Linear(2, 2)
    shared = exchanging(model, lambda: exchanged.append(True))
    with shared as called, NarrowCopies(model, torch.bfloat16):
        called(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is not None
    assert not exchanged


def test_frozen_weights_without_autocast_use_their_own_format(tmp_path) -> None:
    job = trained(tmp_path, "precision=fp32", "peft=lora", "peft.base_weights=bfloat16")
    assert "bfloat16" in job.effective["matmul_dtypes"]


def test_named_head_is_trained_with_adapters(tmp_path) -> None:
    job = trained(tmp_path, "task=sequence_classification", "peft=lora", "model.freeze=[score]")
    trained_heads = [n for n, p in job.bare_model.named_parameters() if p.requires_grad]
    assert any("score" in name for name in trained_heads)


def test_evaluation_uses_the_format_of_16_bit_weights(tmp_path) -> None:
    with pytest.warns(UserWarning, match="Disabling autocast"):
        job = trained(tmp_path, "precision=bf16_pure", "precision.evaluation=float32")
    assert job.effective["eval_matmul_dtypes"] == ["bfloat16"]


def test_small_updates_do_not_change_16_bit_norms(tmp_path) -> None:
    typed = ("precision=bf16_pure", "optimizer.lr=1e-3", "schedule=constant", "train.steps=6")
    moved = []
    for more in ((), ("precision.master=on",)):
        job = trained(tmp_path / str(len(more)), *typed, *more)
        norms = [p for n, p in job.bare_model.named_parameters() if "norm" in n]
        moved.append(any((p != 1).any() for p in norms))
    assert moved == [False, True]


def test_t5_overflows_in_float16_but_not_in_bfloat16() -> None:
    """As if trained in bfloat16: activations of a checkpoint that exceed 65504."""
    finite = {}
    for option in ("fp16", "bf16"):
        plan = plan_of(*LIGHT, "model=tiny_t5", "task=seq2seq_lm", f"precision={option}")
        model = build_model(plan, CPU)
        for name, weight in model.named_parameters():
            if name.endswith(("wi.weight", "wi_0.weight", "wo.weight")):
                weight.data.mul_(1e4)
        with build_formats(plan, CPU).autocast(), torch.no_grad():
            finite[option] = bool(model(**make_inputs(model)).logits.isfinite().all())
    assert finite == {"fp16": False, "bf16": True}


def test_float8_layers_come_from_torchao(tmp_path, monkeypatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ImportError, match="torchao"):
        build_model(light_plan("precision=fp8"), CPU)


@pytest.mark.parametrize(("device", "supported"), [(V100, False), (ADA, True)], ids=["V100", "Ada"])
def test_torchao_requires_the_same_generation_for_float8(device, supported, pretend) -> None:
    from torchao.utils import is_sm_at_least_89

    pretend(device)
    assert bool(is_sm_at_least_89()) is supported


def test_gpt2_and_unaligned_widths_have_no_float8_layer() -> None:
    """With heads that divide it: 72 is no multiple of 16."""
    for typed in (("model=tiny_gpt2",), ("model.hidden_size=72",)):
        model = build_model(hand_plan("precision=fp8", *typed), CPU)
        assert not float8_layers(model)


def test_unaligned_feed_forwards_are_not_converted() -> None:
    from torchao.float8.float8_linear import Float8Linear

    model = build_model(light_plan("precision=fp8", "model.intermediate_size=100"), CPU)
    names = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, Float8Linear)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


def operations(option: str) -> tuple[int, tuple[str, ...]]:
    """How many operations a step has, and the formats of its matrix products."""

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.number += 1
            return func(*args, **(kwargs or {}))

    plan = light_plan(f"precision={option}")
    model = build_model(plan, CPU)
    with build_formats(plan, CPU).autocast(), Count(), KernelProbe() as probe:
        model(**make_inputs(model)).logits.sum().backward()
    return Count.number, probe.matmul_dtypes


def test_uncompiled_float8_adds_operations_and_cpu_has_no_product() -> None:
    plain, _ = operations("bf16")
    scaled, formats = operations("fp8")
    assert scaled > 1.5 * plain, "scaling and rounding, each a kernel of its own"
    assert not any("float8" in name for name in formats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_torchao_rounds_row_scaled_products_to_bfloat16(recipe, dtype, monkeypatch) -> None:
    """As on a GPU, with a stand-in for its kernel that gives whatever it is asked for."""
    asked = []

    def multiply(left, right, scale_a, scale_b, out_dtype, **_):
        asked.append(out_dtype)
        return (left.double() @ right.double() * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3)).to(dtype)
    plan = plan_of(*LIGHT, "precision=fp8", f"precision.float8={recipe}")
    convert_linear_layers(plan, layers, torch.device("cuda"))
    found = layers[1](torch.randn(32, 32, dtype=dtype))
    assert found.dtype == dtype
    assert asked == [torch.bfloat16 if recipe == "rowwise" else dtype]
    assert torch.equal(found, found.bfloat16().to(dtype)) is (recipe == "rowwise")


def test_torchao_skips_narrow_layers() -> None:
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

    converts = _auto_filter_for_recipe("tensorwise", filter_fqns=[])
    assert not converts(nn.Linear(4096, 1024, device="meta"), "narrow")
    assert converts(nn.Linear(4096, 1040, device="meta"), "wide")


@pytest.mark.parametrize(
    ("device", "typed", "row_bytes"),
    [("h200", "bf16", 16), ("h200", "tf32", 16), ("v100_16", "fp16", 16), ("a100_80", "bf16", 128)],
)
def test_tensor_core_alignment_matches_nvidia_table(device, typed, row_bytes) -> None:
    """16 bytes in a row, on an A100 128: the table of the source that the rules name."""
    unit = _unit(RuleInputs(hand_plan(f"precision={typed}").config, DEVICES[device]))
    assert unit[0] * {"bf16": 2, "fp16": 2, "tf32": 4}[typed] == row_bytes
