"""What a change costs: two estimates that can be compared, or none."""

import math

from unit.estimate.time.cases import CPU, large, small
from unit.estimate.time.test_estimate import note_runs, record_of

from eke.estimate.time import forecast_time, num_runs, record_step_time, slowdown
from eke.estimate.time.step_time import MIN_CALIBRATION_RUNS
from eke.estimate.time.time_history import calibrated_step_time


def note_slow_runs(*overrides: str) -> None:
    """Steps that took three times what datasheets say."""
    for n in range(MIN_CALIBRATION_RUNS):
        plan = small(*overrides, f"batch.per_device={2**n}")
        record_step_time(plan, record_of(plan, 3.0 * calibrated_step_time(plan).step_s.expected))


def test_uncalibrated_slowdown_has_a_note() -> None:
    for less, more in (
        (small(), small("memory=checkpointing")),
        (large(), large("batch.per_device=2", "batch.accumulation=2")),  # the same samples
    ):
        found = slowdown(less, more)
        assert 1.0 < found[0] < 1.5
        assert "not calibrated" in found[1]


def test_runs_that_correct_both_are_named() -> None:
    note_slow_runs()
    found = slowdown(small(), small("memory=checkpointing"))
    assert f"calibrated by {MIN_CALIBRATION_RUNS} runs" in found[1]


def test_one_sided_correction_is_not_a_slowdown() -> None:
    """Runs without torch.compile say nothing of those with it."""
    plain, compiled = small(), small("compile=inductor")
    before = slowdown(plain, compiled)
    note_slow_runs()
    assert num_runs(forecast_time(plain)) == MIN_CALIBRATION_RUNS
    assert num_runs(forecast_time(compiled)) == 0
    assert slowdown(plain, compiled) == before


def test_cpu_slowdown_requires_finished_runs() -> None:
    plan, less = small(device=CPU), small("memory=checkpointing", device=CPU)
    assert slowdown(plan, less) is None
    note_runs(12)
    found = slowdown(plan, less)
    assert math.isfinite(found[0])
    assert "calibrated by 12 runs" in found[1]
    assert slowdown(plan, small("precision=bf16", device=CPU)) is None, "no such run has ended"
