"""Linear layers in float8: which ones, and what they compute."""

import pytest
import torch
from torch import nn
from unit.plan.cases import SYNTHETIC, plan_of
from unit.training.model.plans import hand_plan
from unit.training.model.steps import make_inputs

from eke.config.schema import Float8
from eke.training.model.adapters import convert_linear_layers, float8_layers
from eke.training.model.attention_kernels import KernelProbe
from eke.training.model.build_model import build_model

pytest.importorskip("torchao", reason="an extra")

CPU = torch.device("cpu")

SIZE = ("model.hidden_size=32", "model.intermediate_size=64", "model.num_attention_heads=2")

CONVERTED = {"tiny": 13, "tiny_bert": 12, "tiny_t5": 31, "tiny_moe": 7}
"""Option -> linear layers at two layers, but two; transformers' experts are no linear layers."""


def float8_plan(*overrides):
    return plan_of(*SYNTHETIC, *SIZE, "model.num_hidden_layers=2", "precision=fp8", *overrides)


def tasks(option):
    return {"tiny_bert": "masked_lm", "tiny_t5": "seq2seq_lm"}.get(option, "causal_lm")


@pytest.mark.parametrize("option", CONVERTED)
def test_first_and_last_layers_are_not_converted(option) -> None:
    model = build_model(float8_plan(f"model={option}", f"task={tasks(option)}"), CPU)
    layers = float8_layers(model)
    assert len(layers) == CONVERTED[option]
    assert all(layer.config.emulate for layer in layers), "a CPU has no float8 products"
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_gpu_multiplies_in_float8() -> None:
    """Nothing is computed here: the recipe is read from the layers."""
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    convert_linear_layers(float8_plan(), layers, torch.device("cuda"))
    assert [layer.config.emulate for layer in float8_layers(layers)] == [False]


@pytest.mark.parametrize("sides", [(24, 32), (32, 24)], ids=["in", "out"])
def test_layer_with_unaligned_size_is_not_converted(sides) -> None:
    layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(*sides), nn.Linear(32, 32)])
    convert_linear_layers(float8_plan(), layers, CPU)
    assert not float8_layers(layers)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_operands_are_rounded_to_float8(recipe) -> None:
    """float8 e4m3 keeps 4 bits of mantissa, one of them implicit: a relative error up to 2^-4."""
    layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))
    x = torch.randn(7, 32)  # 7 tokens: padded where a kernel wants 16
    exact = layers[1](x)
    weight = layers[1].weight
    convert_linear_layers(float8_plan(f"precision.float8={recipe}"), layers, CPU)
    rounded = layers[1](x)
    error = (rounded - exact).norm() / exact.norm()
    assert 2**-8 < error < 2**-4
    assert layers[1].weight is weight, "the weight itself is left as it was"
    rounded.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_float8_is_off_by_default() -> None:
    assert not float8_layers(build_model(hand_plan("model=tiny"), CPU))


def test_float8_model_has_the_weights_of_other_formats() -> None:
    plain = build_model(plan_of(*SYNTHETIC, *SIZE, "model.num_hidden_layers=2"), CPU)
    model = build_model(float8_plan(), CPU)
    other = model.state_dict()
    assert plain.state_dict().keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in plain.state_dict().items())
    logits = [m.eval()(**make_inputs(m)).logits for m in (plain, model)]
    assert not torch.equal(*logits)


def test_float8_product_is_detected() -> None:
    """torch 2.13 has one on a CPU, too; torchao 0.18 uses it on GPUs alone."""
    x = torch.randn(16, 16).to(torch.float8_e4m3fn)
    scale = torch.ones(())
    with KernelProbe() as probe:
        torch._scaled_mm(x, x.t(), scale, scale, out_dtype=torch.bfloat16)
    assert probe.matmul_dtypes == ["float8_e4m3fn"]


def test_every_recipe_exists_in_torchao() -> None:
    from torchao.float8.config import Float8LinearRecipeName

    known = {recipe.value for recipe in Float8LinearRecipeName}
    assert {recipe.value for recipe in Float8} - {"off"} <= known


@pytest.mark.slow
def test_kernel_probe_detects_float8_products(recwarn) -> None:
    """torchao's tensors say bfloat16; what is multiplied is inside them."""
    from torchao.float8 import convert_to_float8_training

    layer = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16())
    with KernelProbe() as probe:
        layer(torch.randn(32, 64, dtype=torch.bfloat16)).sum().backward()
    assert probe.matmul_dtypes == ["float8_e4m3fn"]
    assert probe.matmuls.total() == 3
