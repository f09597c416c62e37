"""What decides where formulas cannot: a trace that is kept, or one that is made."""

from dataclasses import replace

import pytest
from unit.plan.cases import CPU, GPU, SYNTHETIC, plan_of

from eke.common.errors import ConfigError
from eke.common.text import GIB, MIB
from eke.estimate.memory import (
    Method,
    Traced,
    Verdict,
    forecast,
    known_forecast,
    needs_trace,
    trace_client,
    traced_forecast,
)
from eke.estimate.memory.predict_memory import with_available_bytes
from eke.launch.processes.sweep import SweepRun
from eke.models.sizes import state_bytes
from eke.workflows.planning import check_memory_fit
from eke.workflows.sweep import trace_undecided_runs

ALLOCATED = {"load": 10 * MIB, "forward": 90 * MIB, "backward": 100 * MIB, "optimizer": 60 * MIB}


def trace_of(factor: int = 1) -> Traced:
    """A trace that needs so many times 100 MiB."""
    allocated = {phase: factor * size for phase, size in ALLOCATED.items()}
    return Traced(allocated, allocated, {"weights": 100 * MIB * factor})


@pytest.fixture
def plan():
    """A plan of which formulas cannot tell whether it has room."""
    closed = forecast(plan_of(*SYNTHETIC))
    middle = (closed.peak.low + closed.peak.expected) // 2
    made = with_available_bytes(plan_of(*SYNTHETIC), middle)
    assert needs_trace(forecast(made))
    return made


@pytest.fixture
def asked(monkeypatch):
    """Plans whose trace was made; `answer` is what is found."""

    class Asked(list):
        answer = trace_client.TraceResult(trace_of())

    found = Asked()

    def traced(plan):
        found.append(plan)
        return found.answer

    def trace_all(plans, progress, processes):
        progress(len(plans), len(plans))
        return [traced(plan) for plan in plans]

    monkeypatch.setattr(trace_client, "get_or_run_trace", traced)
    monkeypatch.setattr(trace_client, "trace_all", trace_all)
    return found


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(trace_client, "cache_folder", lambda: tmp_path)


def test_stored_trace_is_used_without_starting_a_worker(plan, asked) -> None:
    assert known_forecast(plan).method is Method.closed_form
    trace_client.keep_trace(trace_client.trace_key(plan), trace_of())
    assert known_forecast(plan).method is Method.trace
    assert not needs_trace(known_forecast(plan))
    assert not asked


def test_forecast_with_a_clear_result_is_decided() -> None:
    closed = forecast(plan_of(*SYNTHETIC))
    for room in (closed.peak.low - 1, closed.peak.high):
        assert not needs_trace(forecast(with_available_bytes(plan_of(*SYNTHETIC), room)))
    unknown = replace(CPU, memory_bytes=None)
    assert not needs_trace(forecast(plan_of(*SYNTHETIC, device=unknown)))


def test_reason_for_a_missing_trace_is_reported(plan, asked) -> None:
    asked.answer = trace_client.TraceResult(None, "the trace took longer than 1 s")
    found = traced_forecast(plan)
    assert found.method is Method.closed_form
    assert found.notes[-1] == "not traced: the trace took longer than 1 s"


def test_run_that_may_not_fit_is_traced_first(plan, asked) -> None:
    asked.answer = trace_client.TraceResult(trace_of(10_000))
    with pytest.raises(ConfigError, match="needs at least") as caught:
        check_memory_fit(plan)
    assert caught.value.problems[0].id == "does_not_fit"
    assert asked == [plan]
    asked.answer = trace_client.TraceResult(Traced({"forward": 1}, {"forward": 1}, {}))
    assert check_memory_fit(plan) is plan, "it fits"


def test_run_that_fits_is_not_traced(asked) -> None:
    plan = plan_of(*SYNTHETIC, device=replace(CPU, memory_bytes=64 * GIB))
    assert check_memory_fit(plan) is plan
    assert not asked


def test_tight_trace_is_a_warning(plan, asked) -> None:
    capacity = int(100 * MIB * 1.005)
    tight = with_available_bytes(plan, capacity)
    asked.answer = trace_client.TraceResult(trace_of())
    found = traced_forecast(tight)
    assert found.verdict is Verdict.tight
    (warning,) = check_memory_fit(tight, found=found).warnings
    assert warning.startswith("memory: 100.00 MiB expected")


def test_undecided_runs_of_a_sweep_are_traced_together(plan, asked) -> None:
    fits = plan_of(*SYNTHETIC, device=replace(CPU, memory_bytes=64 * GIB))
    asked.answer = trace_client.TraceResult(trace_of(10_000))
    cells = [
        SweepRun(("a",), "1"),
        SweepRun(("b",), "2"),
        SweepRun(("c",), outcome="refused", reason="why"),
    ]
    plans, told = [fits, plan, None], []
    trace_undecided_runs(cells, plans, lambda done, total: told.append((done, total)))
    assert (asked, told) == ([plan], [(1, 1)])
    assert plans == [fits, None, None]
    assert [cell.outcome for cell in cells] == ["", "refused", "refused"]
    assert "needs at least" in cells[1].reason
    assert (cells[1].run_id, cells[1].rule) == ("", "does_not_fit")
    assert cells[2].reason == "why"


def test_reserve_and_tensors_of_a_trace_are_separated() -> None:
    plan = plan_of(*SYNTHETIC, device=GPU)
    reserved = {
        "load": 12 * MIB,
        "forward": 95 * MIB,
        "backward": 130 * MIB,
        "optimizer": 130 * MIB,
    }
    traced = Traced(ALLOCATED, reserved, {"weights": 10 * MIB, "autocast_cache": 5 * MIB})
    found = forecast(plan, traced)
    assert found.components["reserve"] == 30 * MIB
    assert found.components["autocast"] == 5 * MIB
    assert {p: found.phases[p] for p in ALLOCATED} == ALLOCATED, "without the reserve"
    assert found.allocated.expected == 100 * MIB
    assert sum(found.components.values()) == found.peak.expected


@pytest.mark.parametrize("other", [{"is_exact": False}, {"method": Method.upper_bound}], ids=str)
def test_approximate_trace_keeps_formula_bounds(other) -> None:
    """A trace of the longest rows must refuse no run that may never see one."""
    plan = plan_of(*SYNTHETIC)
    closed = forecast(plan)
    sizes = dict.fromkeys(("forward", "backward", "optimizer"), closed.peak.expected)
    sure = forecast(plan, Traced(sizes, sizes, {}))
    unsure = forecast(plan, Traced(sizes, sizes, {}, **other))
    assert sure.peak.low > closed.peak.low
    assert sure.peak.high < closed.peak.high
    assert unsure.peak.low <= closed.peak.low
    assert unsure.peak.high >= closed.peak.high


def test_communication_buffers_come_from_the_formulas() -> None:
    plan = plan_of(*SYNTHETIC, "distributed=ddp", "distributed.num_processes=2")
    beside = dict.fromkeys(ALLOCATED, 400 * MIB)
    found = forecast(plan, replace(trace_of(), beside=beside))
    held = state_bytes(plan.config)
    # Buckets hold all gradients from the first step on, when activations are at their highest, too.
    assert found.peak.expected == held.total + 400 * MIB
