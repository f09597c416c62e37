"""Compiled plans on fake tensors: what of a graph has memory, and when the eager model stands in."""

import json

import pytest
import torch
from support import REPO, last_wins
from torch.fx.experimental.proxy_tensor import make_fx

from eke.config.compose import compose
from eke.estimate.memory.components import Method
from eke.training.trace import trace_plan
from eke.training.trace.compiled import FusedGraph
from eke.training.trace.trace_plan import trace
from eke.workflows.planning import plan_for

SMALL = (
    "model=tiny", "model.hidden_size=64", "model.num_hidden_layers=1", "data=synthetic",
    "data.seq_len=64", "data.num_samples=64", "batch.per_device=2", "tracker=none",
)  # fmt: skip

GIB = 2**30


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


def test_a_result_overwrites_what_is_given_up_but_no_other_input() -> None:
    graph = make_fx(lambda x, w: (x.exp().mm(w)).relu())(torch.empty(4, 4), torch.empty(4, 4))
    run = FusedGraph(graph)
    x, w = torch.rand(4, 4), torch.rand(4, 4)
    arguments = [x, w]
    (out,) = (run.run(arguments),)
    assert not arguments
    assert out.shape == (4, 4)


def test_what_cannot_be_compiled_is_traced_eagerly(monkeypatch) -> None:
    def fails(*_, **__):
        raise RuntimeError("no")

    monkeypatch.setattr(trace_plan, "compile_for_trace", fails)
    found = trace(plan_of("compile=inductor", "hardware=cpu"))
    assert (found.method, found.is_exact) == (Method.upper_bound, False)
    assert "eager model" in found.notes[0]


def test_cuda_graphs_are_traced_eagerly() -> None:
    found = trace(plan_of("compile=cudagraphs", "hardware=h100"))
    assert found.method is Method.upper_bound


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_1b_4096", "llama_1b_4096_fused_loss"])
def test_an_h100s_peak_is_that_of_the_trace(name) -> None:
    """0.1 %: the run's own CUDA build took memory for nothing else."""
    run = json.loads((REPO / "results" / "gpu_runs_h100.json").read_text())["runs"][name]
    plan = plan_for(compose([*run["overrides"], "hardware=h100", "tracker=none"]), planning=True)
    found = trace(plan)
    assert found.method is Method.trace
    measured = run["memory"]["measured"]["peak_allocated_bytes"]
    assert max(found.allocated.values()) == pytest.approx(measured, rel=0.01)
