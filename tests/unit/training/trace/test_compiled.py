"""Compiled plans on fake tensors: what has memory, and when the eager model stands in."""

import json
import weakref

import pytest
import torch
from support import REPO, last_wins
from torch.fx.experimental.proxy_tensor import make_fx

from eke.config.compose import compose
from eke.estimate.memory.components import Method
from eke.training.model import loss
from eke.training.model.loss import compiled_loss_sum
from eke.training.trace import trace_plan
from eke.training.trace.compiled import FusedGraph, compile_for_trace
from eke.training.trace.fakes import fake_surroundings
from eke.training.trace.trace_plan import trace
from eke.workflows.planning import plan_for

SMALL = (
    "model=tiny", "model.hidden_size=64", "model.num_hidden_layers=1", "data=synthetic",
    "data.seq_len=64", "data.num_samples=64", "batch.per_device=2", "tracker=none",
)  # fmt: skip

# Dynamo (torch 2.13) looks at it for each input; it hides the warning of real tensors only.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def plan_of(*overrides):
    return plan_for(compose(list(last_wins(*SMALL, *overrides))), planning=True)


def steps_of(function, *shapes) -> list[str]:
    graph = make_fx(function)(*map(torch.empty, shapes))
    return [node.name for node in FusedGraph(graph)._steps]


def test_what_is_fused_into_a_reader_has_no_memory() -> None:
    def function(x, w):
        return ((x.relu() * 2).mm(w) + 1).exp().sum(0)

    assert steps_of(function, (4, 3), (3, 5)) == ["mul", "mm", "sum_1", "output"]


def test_a_view_that_a_kernel_reads_gives_its_base_memory() -> None:
    def function(x, w):
        return x.exp().t().mm(w), x.view(-1)

    assert steps_of(function, (4, 3), (4, 5)) == ["exp", "mm", "output"]


def test_a_sum_of_many_is_stored_for_its_readers() -> None:
    def function(*each):
        total = each[0]
        for one in each[1:]:
            total = total + one
        return total.sin(), total.cos()

    assert steps_of(function, *[(4,)] * 4) == ["sin", "cos", "output"]
    assert steps_of(function, *[(4,)] * 5)[0] == "add_3"


def test_what_is_saved_for_the_backward_pass_goes_when_it_was_read() -> None:
    graph = make_fx(lambda x: x.exp().sum(0))(torch.empty(4, 3))
    arguments = [torch.empty(4, 3)]
    gone = weakref.ref(arguments[0])
    assert FusedGraph(graph)(arguments).shape == (3,)
    assert gone() is None


def test_what_cannot_be_compiled_is_traced_eagerly(monkeypatch) -> None:
    def fails(*_, **__):
        raise RuntimeError("no")

    monkeypatch.setattr(trace_plan, "compile_for_trace", fails)
    found = trace(plan_of("compile=inductor", "hardware=cpu"))
    assert (found.method, found.is_exact) == (Method.upper_bound, False)
    assert "eager model" in found.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_1b_4096", "llama_1b_4096_fused_loss"])
def test_an_h100s_peak_is_that_of_the_trace(name) -> None:
    run = json.loads((REPO / "results" / "gpu_runs_h100.json").read_text())["runs"][name]
    plan = plan_for(compose([*run["overrides"], "hardware=h100", "tracker=none"]), planning=True)
    found = trace(plan)
    assert found.method is Method.trace
    measured = run["memory"]["measured"]["peak_allocated_bytes"]
    assert max(found.allocated.values()) == pytest.approx(measured, rel=0.01)


def test_a_run_in_this_process_does_not_get_code_of_a_trace() -> None:
    compiled_loss_sum.cache_clear()
    with fake_surroundings(compile_for_trace):
        assert loss.compiled_loss_sum() is loss.compiled_loss_sum()
    assert loss.compiled_loss_sum is compiled_loss_sum
    assert compiled_loss_sum.cache_info().currsize == 0
