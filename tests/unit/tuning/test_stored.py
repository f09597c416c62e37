"""What a record says of a forecast."""

import pytest
from unit.plan.cases import plan_of

from eke.common.paths import RunPaths
from eke.estimate.memory import forecast
from eke.hardware import DEVICES
from eke.plan.planner import outline_record
from eke.plan.record import Outcome, read_record, write_record
from eke.tuning.memory_advice import note_predictions


@pytest.mark.parametrize("outcome", [Outcome.ok, Outcome.oom, Outcome.crashed])
def test_records_have_the_prediction_and_advice_only_after_oom(outcome) -> None:
    plan = plan_of("data=synthetic")
    record = outline_record(plan, [], 0, outcome, None)
    note_predictions(record, plan)
    predicted, found = record.memory.predicted, forecast(plan)
    assert (predicted.low, predicted.expected, predicted.high) == (
        found.peak.low,
        found.peak.expected,
        found.peak.high,
    )
    assert predicted.components == found.components
    assert predicted.method == "closed_form"
    assert record.timing.predicted_step_s is None, "of a processor, without runs"
    on_gpu = outline_record(
        gpu := plan_of("data=synthetic", device=DEVICES["a100_80"]), [], 0, outcome, None
    )
    note_predictions(on_gpu, gpu)
    assert on_gpu.timing.predicted_step_s.calibrated.runs == 0
    assert bool(record.memory.advice) == (outcome is Outcome.oom)


def test_record_with_corrected_forecast_is_read(tmp_path) -> None:
    plan = plan_of("data=synthetic")
    record, paths = outline_record(plan, [], 0, Outcome.ok, None), RunPaths(tmp_path)
    note_predictions(record, plan)
    record.memory.predicted.calibrated = {"runs": 7, "needed": 5, "factor": 1.1, "versions": ""}
    write_record(paths, record)
    assert read_record(paths) == record
