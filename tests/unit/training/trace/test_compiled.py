"""Compiled plans on fake tensors: what has memory, and when the eager model stands in."""

import json

import pytest
import torch
import torch._inductor.compile_fx  # as trace_plan does, before functions are replaced
from support import REPO, last_wins
from torch._subclasses.fake_tensor import FakeTensorMode

from eke.config.compose import compose
from eke.estimate.memory.components import Method
from eke.training.model import loss
from eke.training.model.loss import compiled_loss_sum
from eke.training.trace import trace_plan
from eke.training.trace.compiled import CPP_REPLACEMENTS, compile_for_trace
from eke.training.trace.fake_device import fake_surroundings
from eke.training.trace.fake_gpu import fake_gpu
from eke.training.trace.operations import Questions, Workspaces
from eke.training.trace.trace import StorageTrace
from eke.training.trace.trace_plan import trace
from eke.workflows.planning import plan_for

SMALL = (
    "model=tiny", "model.hidden_size=64", "model.num_hidden_layers=1", "data=synthetic",
    "data.seq_len=64", "data.num_samples=64", "batch.per_device=2", "tracker=none",
)  # fmt: skip

CPU = torch.device("cpu")

# Dynamo (torch 2.13) looks at it for each input; it hides the warning of real tensors only.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def plan_of(*overrides):
    return plan_for(compose(list(last_wins(*SMALL, *overrides))), planning=True)


def births_of(function, *shapes, device=CPU) -> list[int]:
    """Numbers of float32 in each storage that the compiled function makes."""
    mode = FakeTensorMode()
    watch = StorageTrace(mode, device, Questions(False, mode), Workspaces(device.type))
    with fake_surroundings(compile_for_trace):
        compiled = compile_for_trace(function)
        with mode:
            given = [torch.empty(shape, device=device) for shape in shapes]
        with watch:
            watch.begin("forward")
            compiled(*given)
    return [num_bytes // 4 for _, num_bytes in watch.history.events if num_bytes > 0]


@pytest.mark.parametrize("device", [CPU, fake_gpu()], ids=str)
def test_fused_intermediate_results_take_no_memory(device) -> None:
    def function(x, w):
        return ((x.relu() * 2).mm(w) + 1).exp().sum(0)

    assert births_of(function, (40, 30), (30, 50), device=device) == [1200, 2000, 50]


def test_result_reuses_memory_of_its_last_input() -> None:
    def function(x, w):
        return (x.mm(w) + 1).mm(w).exp()

    assert births_of(function, (40, 30), (30, 30)) == [1200, 1200]


def test_nested_view_offsets_add_up() -> None:
    part = CPP_REPLACEMENTS["reinterpret_tensor"](torch.arange(9)[2:], (2,), (1,), 3)
    assert part.tolist() == [5, 6]


def test_recomputed_layers_are_traced_as_compiled() -> None:
    """On a CPU: tests/e2e/test_memory_truth.py."""
    again = ("compile=inductor", "compile.regional=true", "memory=checkpointing")
    found = trace(plan_of(*again, "model.num_hidden_layers=1", "hardware=h100"))
    assert (found.method, found.is_exact) == (Method.trace, True), found.notes


def test_uncompilable_model_is_traced_eagerly(monkeypatch) -> None:
    def fails(*_, **__):
        raise RuntimeError("no")

    monkeypatch.setattr(trace_plan, "compile_for_trace", fails)
    found = trace(plan_of("compile=inductor", "hardware=cpu"))
    assert (found.method, found.is_exact) == (Method.upper_bound, False)
    assert "eager model" in found.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_1b_4096", "llama_1b_4096_fused_loss"])
def test_h100_peak_matches_the_trace(name) -> None:
    run = json.loads((REPO / "results" / "gpu_runs_h100.json").read_text())["runs"][name]
    plan = plan_for(compose([*run["overrides"], "hardware=h100", "tracker=none"]), planning=True)
    found = trace(plan)
    assert found.method is Method.trace
    measured = run["memory"]["measured"]["peak_allocated_bytes"]
    assert max(found.allocated.values()) == pytest.approx(measured, rel=0.01)


def test_trace_does_not_leave_compiled_code_for_a_run() -> None:
    compiled_loss_sum.cache_clear()
    with fake_surroundings(compile_for_trace):
        assert loss.compiled_loss_sum() is loss.compiled_loss_sum()
    assert loss.compiled_loss_sum is compiled_loss_sum
    assert compiled_loss_sum.cache_info().currsize == 0
