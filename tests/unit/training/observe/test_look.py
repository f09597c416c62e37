"""Where the profiled step of a CPU run is cut into pieces."""

from types import SimpleNamespace

import pytest

from eke.training.loop.meter import Clock, Meter
from eke.training.observe.observe_run import _cut_by_micro_batch


@pytest.mark.parametrize(
    ("processes", "is_complete", "cuts"),
    [
        pytest.param(1, False, ["forward", "forward"], id="before each micro-batch but the first"),
        pytest.param(2, True, ["forward", "forward"], id="of several processes, too"),
        pytest.param(2, False, [], id="not where other threads free memory and nobody counts it"),
    ],
)
def test_each_micro_batch_is_profiled_separately(processes, is_complete, cuts) -> None:
    batch = SimpleNamespace(world_size=processes)
    meter = Meter(Clock(), attempt=0, timed_from=0)
    job = SimpleNamespace(plan=SimpleNamespace(batch=batch), meter=meter)
    found: list[str] = []
    profile = SimpleNamespace(cut=lambda: found.append("forward"), is_complete=is_complete)
    phases = ["data", *["forward", "backward"] * 3, "optimizer"]
    with _cut_by_micro_batch(job, profile):
        for phase in phases:
            meter.enter(phase)
    assert found == cuts
    meter.enter("forward")
    assert found == cuts, "and nobody watches the next step"
