"""torch.compile: same numbers, names that survive, and a report that counts."""

import json
import os
import subprocess
import sys

import pytest
import torch
from support import REPO, TINY, environment
from unit.training.model.plans import hand_plan, options_of
from unit.training.model.steps import make_inputs, step

from eke.common.errors import RunError
from eke.config.schema import CompileMode
from eke.config.schema.model import GRAPH_MODES
from eke.training.model.attention_kernels import KernelProbe
from eke.training.model.build_model import build_model
from eke.training.model.checkpointing import apply_checkpointing
from eke.training.model.number_formats import compile_model, compile_report

CPU = torch.device("cpu")

# Importing inductor in torch 2.13 uses torch.jit.script_method, which torch itself deprecates.
IGNORE_JIT = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


def build(*overrides):
    """The eager model and its compiled twin; they share their weights."""
    plan = hand_plan(*TINY, *overrides)
    model = build_model(plan, CPU)
    apply_checkpointing(plan, model)
    return model, compile_model(plan, model)


def test_options_are_pytorch_backends():
    assert options_of("compile") - {"none"} <= set(torch._dynamo.list_backends(exclude_tags=None))


def test_compile_none_returns_the_model():
    model, same = build("compile=none")
    assert same is model
    assert not hasattr(model, "_orig_mod")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["compile=inductor"], id="inductor", marks=[IGNORE_JIT, pytest.mark.slow]),
        pytest.param(["compile=aot_eager", "memory=checkpointing"], id="aot_eager checkpointing"),
        pytest.param(
            ["compile=eager", "model=tiny_t5", "task=seq2seq_lm", "model.num_decoder_layers=1"],
            id="eager t5",
        ),
    ],
)
def test_loss_and_gradients_match_eager(overrides):
    """tests/equivalence/test_same_mathematics.py compiles the other families."""
    model, compiled = build("attention=eager", "model.num_hidden_layers=1", *overrides)
    inputs = make_inputs(model)
    loss, gradients = step(model, **inputs)
    gradients = {name: grad.clone() for name, grad in gradients.items()}
    compiled_loss, _ = step(compiled, **inputs)
    compiled_gradients = {n: p.grad for n, p in compiled._orig_mod.named_parameters()}
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(compiled_gradients, gradients, rtol=1e-4, atol=1e-6)
    report = compile_report()
    assert report["graphs"] >= 1
    assert report["compile_s"] > 0


@pytest.mark.slow
def test_new_shape_is_a_recompilation():
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


def test_evaluation_after_a_probed_step_is_not_compiled_again():
    model, compiled = build("compile=eager")
    inputs = make_inputs(model)

    def evaluate():
        with torch.no_grad():
            compiled.eval()(**inputs)

    evaluate()
    with KernelProbe():
        step(compiled.train(), **inputs)
    step(compiled, **inputs)
    assert compile_report()["graphs"] == 2
    evaluate()
    assert compile_report()["graphs"] == 2


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


REGIONAL = ("compile.regional=true", "model.num_hidden_layers=4")


@pytest.fixture
def limit_of_recompilation():
    """Regional compilation raises PyTorch's; other tests have the default."""
    limit = torch._dynamo.config.recompile_limit
    yield
    torch._dynamo.config.recompile_limit = limit


# torch 2.13 looks at .grad of a layer's inputs while it compiles; outside pytest it warns once.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("limit_of_recompilation")
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["compile=eager"], id="eager"),
        pytest.param(
            ["compile=aot_eager", "memory=checkpointing_selective"],
            id="selective",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_regional_compilation_compiles_one_layer(overrides):
    whole, compiled = build(*overrides, *REGIONAL[1:])
    inputs = make_inputs(whole)
    loss, gradients = step(compiled, **inputs)
    gradients = {name.removeprefix("_orig_mod."): g.clone() for name, g in gradients.items()}
    all_layers = compile_report()
    model, same = build(*overrides, *REGIONAL)
    assert same is model
    regional_loss, regional_gradients = step(model, **inputs)
    one_layer = compile_report()
    torch.testing.assert_close(regional_loss, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(regional_gradients, gradients, rtol=1e-4, atol=1e-6)
    assert (one_layer["graphs"], one_layer["graph_breaks"]) == (1, 0)
    assert 0 < one_layer["operations"] < all_layers["operations"] / 3
    assert next(iter(model.state_dict())) == "model.embed_tokens.weight"


def test_regional_compilation_requires_layers():
    with pytest.raises(RunError, match=r"Linear.*\n  -> compile.regional=false"):
        compile_model(hand_plan("compile=eager", "compile.regional=true"), torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["compile=inductor"], {"backend": "inductor"}),
        (
            ["compile=inductor", "compile.mode=reduce_overhead"],
            {"backend": "inductor", "mode": "reduce-overhead"},
        ),
        (
            ["compile=inductor", "compile.mode=max_autotune_no_cudagraphs"],
            {"backend": "inductor", "mode": "max-autotune-no-cudagraphs"},
        ),
        (["compile=cudagraphs"], {"backend": "cudagraphs"}),
        (["compile=eager", "compile.mode=max_autotune"], {"backend": "eager"}),
    ],
    ids=["default", "reduce_overhead", "max_autotune", "cudagraphs", "not inductor's"],
)
def test_backend_and_mode_reach_the_compiler(overrides, expected, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "compile", lambda model, **arguments: seen.append(arguments))
    compile_model(hand_plan(*TINY, *overrides), torch.nn.Linear(2, 2))
    assert seen == [expected]


def test_modes_are_pytorch_modes():
    """cudagraphs is CUDA's alone, and reduce_overhead and max_autotune use it there."""
    from torch._inductor import list_mode_options

    modes = {mode.value.replace("_", "-") for mode in CompileMode} - {"default"}
    assert modes <= set(list_mode_options())
    graphs = {mode.value for mode in GRAPH_MODES}
    options = {
        m: list_mode_options(m.replace("_", "-")) for m in (mode.value for mode in CompileMode)
    }
    assert {m for m, o in options.items() if o.get("triton.cudagraphs")} == graphs


TWO_MODELS = """
import json, torch
from torch.utils.checkpoint import checkpoint
from unit.training.model.plans import hand_plan
from eke.training.model.checkpointing import _checkpoint_arguments
from eke.training.model.number_formats import compile_model, compile_report
layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(2)))
class Plain(torch.nn.Module):
    def forward(self, x):
        return layers(x)
class Checkpointed(torch.nn.Module):
    def forward(self, x):
        return checkpoint(layers, x, **arguments)
reports = []
for memory, kind in (("none", Plain), ("checkpointing_selective", Checkpointed)):
    plan = hand_plan("compile=inductor", f"memory={memory}")
    arguments = _checkpoint_arguments(plan)
    compile_model(plan, kind())(torch.ones(2, 4)).sum().backward()
    reports.append(compile_report())
print(json.dumps(reports))
"""


@pytest.mark.slow
def test_second_process_reuses_compiled_code(tmp_path):
    """Counters, not seconds: inductor's caches lie in a folder that processes share.

    Products alone: PyTorch has their kernels, and nothing is compiled in C++.
    """
    paths = os.pathsep.join([f"{REPO}/src", f"{REPO}/tests"])
    where = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": paths}
    processes = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", TWO_MODELS],
            env=environment(tmp_path) | where,
            capture_output=True,
            text=True,
            check=True,
        )
        processes.append(json.loads(done.stdout.splitlines()[-1]))
    for first, second in zip(*processes, strict=True):
        assert second["cache_misses"] == second["cache_bypasses"] == 0
        assert first["cache_misses"] == second["cache_hits"] > 0
