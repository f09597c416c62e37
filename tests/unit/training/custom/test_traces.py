"""Memory traces of own code against the CPU's truth."""

import pytest
from own_plans import chars, on_path, own_plan, pairs, run_folder, shapes
from trained import train_job

from eke.config import schema
from eke.plan.own_code import code_store, serve_code, store_code
from eke.training.trace.trace_plan import Untraceable, trace

on_path()

PROJECTS = {
    "chars": (chars(ragged=False, hidden=64, length=16), 24),
    "shapes": (shapes(width=64), 20),
    "pairs": (pairs(width=64), 16),
}


@pytest.mark.parametrize("project", PROJECTS)
@pytest.mark.parametrize(
    "technique", [(), ("memory=checkpointing", "batch.accumulation=2", "precision=bf16")]
)
def test_traces_of_strangers(project, technique, make_plan, tmp_path) -> None:
    groups, samples = PROJECTS[project]
    plan = own_plan(make_plan, "batch.per_device=4", *technique, samples=samples, **groups)
    found = trace(plan)
    job = train_job(plan, run_folder(tmp_path, plan))
    assert job.profiled_peak is not None
    # The largest of ragged samples is traced.
    off = 0.05 if project == "pairs" else 0.01
    assert max(found.allocated.values()) == pytest.approx(job.profiled_peak, rel=off)
    assert found.is_exact is (project != "pairs")


def asks(how: str) -> dict[str, object]:
    return {
        "model": schema.CustomModel(target="shapes.parts.Asks", args={"how": how}),
        "data": schema.CustomData(target="shapes.data.Images", keys=["image", "label"]),
        "loss": schema.CustomLoss(target="shapes.net.smooth"),
    }


@pytest.mark.parametrize("how", ["item", "index", "nonzero", "numpy"])
def test_questions_about_values_end_the_trace_at_their_line(how, make_plan, request) -> None:
    plan = own_plan(make_plan, "batch.per_device=4", samples=20, **asks(how))
    assert plan.code is not None
    store_code(plan.code)
    serve_code(plan.code, code_store(plan.code))
    request.addfinalizer(lambda: serve_code(None, code_store(plan.code)))
    with pytest.raises(Untraceable, match=r"parts\.py:\d+"):
        trace(plan)


@pytest.mark.parametrize("how", ["lstm", "conv1d"])
def test_kernels_of_unknown_memory_are_not_exact(how, make_plan) -> None:
    plan = own_plan(make_plan, "batch.per_device=4", samples=20, **asks(how))
    assert trace(plan).is_exact is False
