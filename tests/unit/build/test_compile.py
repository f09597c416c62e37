"""torch.compile: same numbers, names that survive, and a report that counts."""

import pytest
import torch
from support import TINY
from unit.build.plans import hand_plan, options_of
from unit.build.steps import make_inputs, step

from eke.build.checkpointing import apply_checkpointing
from eke.build.compile import BACKENDS, compile_model, compile_report, unwrap
from eke.build.model import build_model

CPU = torch.device("cpu")

# Importing inductor in torch 2.13 uses torch.jit.script_method, which torch itself deprecates.
IGNORE_JIT = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


def build(*overrides):
    """The eager model and its compiled twin; they share their weights."""
    plan = hand_plan(*TINY, *overrides)
    model = build_model(plan, CPU)
    apply_checkpointing(plan, model)
    return model, compile_model(plan, model)


def test_options_are_the_builders():
    assert set(BACKENDS) == options_of("compile")


def test_none_is_the_model_itself():
    model, same = build("compile=none")
    assert same is model
    assert unwrap(model) is model


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["compile=eager"], id="eager"),
        pytest.param(["compile=aot_eager"], id="aot_eager"),
        pytest.param(["compile=inductor"], id="inductor", marks=IGNORE_JIT),
        pytest.param(["compile=aot_eager", "memory=checkpointing"], id="checkpointing"),
        pytest.param(["compile=aot_eager", "model=tiny_gpt2"], id="gpt2"),
        pytest.param(["compile=aot_eager", "model=tiny_bert", "task=masked_lm"], id="bert"),
        pytest.param(["compile=aot_eager", "model=tiny_t5", "task=seq2seq_lm"], id="t5"),
    ],
)
def test_same_loss_and_gradients_as_eager(overrides):
    model, compiled = build("attention=eager", *overrides)
    inputs = make_inputs(model)
    loss, gradients = step(model, **inputs)
    gradients = {name: grad.clone() for name, grad in gradients.items()}
    compiled_loss, _ = step(compiled, **inputs)
    compiled_gradients = {n: p.grad for n, p in unwrap(compiled).named_parameters()}
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(compiled_gradients, gradients, rtol=1e-4, atol=1e-6)
    report = compile_report()
    assert report["graphs"] >= 1
    assert report["compile_s"] > 0


def test_names_of_the_unwrapped_model_are_the_eager_ones():
    model, compiled = build("compile=eager")
    assert compiled is not model
    assert unwrap(compiled) is model
    assert next(iter(unwrap(compiled).state_dict())) == "model.embed_tokens.weight"


def test_weights_loaded_into_the_unwrapped_model_are_used():
    model, compiled = build("compile=eager")
    inputs = make_inputs(model)
    compiled(**inputs)
    other = build_model(hand_plan(*TINY, "seed=9"), CPU)
    unwrap(compiled).load_state_dict(other.state_dict())
    torch.testing.assert_close(compiled(**inputs).logits, other(**inputs).logits)


def test_a_new_shape_is_a_recompilation():
    model, compiled = build("compile=eager")
    step(compiled, **make_inputs(model, length=16))
    first = compile_report()
    assert (first["graphs"], first["recompiles"]) == (1, 0)
    step(compiled, **make_inputs(model, length=16, seed=1))
    assert compile_report() == first
    step(compiled, **make_inputs(model, length=24))
    second = compile_report()
    assert (second["graphs"], second["recompiles"]) == (2, 1)
    assert second["compile_s"] > first["compile_s"]


def test_graph_breaks_are_counted():
    class Broken(torch.nn.Module):
        def forward(self, x):
            y = x + 1
            torch._dynamo.graph_break()
            return y * 2

    compiled = compile_model(hand_plan("compile=eager"), Broken())
    compiled(torch.ones(3))
    report = compile_report()
    assert (report["graph_breaks"], report["graphs"]) == (1, 2)


def test_compiling_starts_the_report_at_zero():
    model, compiled = build("compile=eager")
    step(compiled, **make_inputs(model))
    build("compile=eager")
    assert compile_report() == {"graphs": 0, "graph_breaks": 0, "recompiles": 0, "compile_s": 0.0}
