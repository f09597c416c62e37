"""Attention implementations, and the probe that tells them apart."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from unit.models.sizes.configs import FAMILY_CASES
from unit.training.model.plans import hand_plan, options_of
from unit.training.model.steps import make_inputs, step

from eke.config.schema.model import AUTO_ATTENTION
from eke.training.model.attention_kernels import ATTENTION, KernelProbe
from eke.training.model.build_model import build_model
from eke.training.model.number_formats import compile_model

CPU = torch.device("cpu")

# Importing inductor in torch 2.13 uses torch.jit.script_method, which torch itself deprecates.
IGNORE_JIT = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

NUM_MATMULS_TINY = 3 * (4 * 7 + 1)
"""4 layers of 7 projections and the output; each once forward and twice backward."""


def build(*overrides):
    return build_model(hand_plan(*overrides), CPU)


def probe(model, **inputs):
    return probed_step(model, **inputs)[0]


def probed_step(model, **inputs):
    """What was seen of one training step, and its loss and gradients."""
    with KernelProbe() as watched:
        result = step(model, **inputs)
    return watched, result


def test_options_match_builders():
    assert {*ATTENTION, AUTO_ATTENTION} == options_of("attention")


@pytest.mark.parametrize(("option", "task"), FAMILY_CASES, ids=lambda value: value)
def test_eager_and_sdpa_give_the_same_loss_and_gradients(option, task):
    """By different kernels."""
    # T5 adds a learnt bias to the scores, whose gradient the fused CPU kernel does not give.
    fused = "math" if option == "tiny_t5" else "flash_cpu"
    results = []
    for attention, kernel in (("eager", "eager"), ("sdpa", fused)):
        model = build(f"model={option}", f"task={task}", f"attention={attention}")
        seen, result = probed_step(model)
        assert kernel in seen.attention_kernels
        results.append(result)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_counts_and_formats_of_a_float32_step():
    seen = probe(build("model=tiny"))
    assert seen.attention_kernels == {"flash_cpu"}
    assert seen.matmul_dtypes == ["float32"]
    assert seen.matmuls.total() == NUM_MATMULS_TINY


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_formats_are_detected(dtype):
    model = build("model=tiny_bert", "task=masked_lm")
    with KernelProbe() as watched, torch.autocast("cpu", dtype=dtype):
        model(**make_inputs(model)).logits.float().mean().backward()
    assert watched.matmul_dtypes == [str(dtype).removeprefix("torch.")]


def test_pinned_backend_is_detected():
    with sdpa_kernel(SDPBackend.MATH):
        assert probe(build("model=tiny")).attention_kernels == {"math"}


def test_kernel_probe_observes_backward():
    model = build("model=tiny_gpt2")
    with KernelProbe() as forward:
        loss = model(**make_inputs(model)).logits.mean()
    with KernelProbe() as backward:
        loss.backward()
    assert forward.matmuls.total() == 4 * 4 + 1
    assert backward.matmuls.total() == 2 * (4 * 4 + 1)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("aot_eager", id="aot_eager"),
        pytest.param("inductor", id="inductor", marks=[IGNORE_JIT, pytest.mark.slow]),
    ],
)
def test_compiled_code_is_probed_without_recompilation(backend):
    plan = hand_plan("model.num_hidden_layers=1", f"compile={backend}")
    model = compile_model(plan, build_model(plan, CPU))
    inputs = make_inputs(model)
    step(model, **inputs)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    seen = probe(model, **inputs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0
    assert seen.attention_kernels == {"flash_cpu"}
    assert seen.matmuls.total() >= 3 * (7 + 1)  # one layer of 7 projections, and the output
