"""Text, JSON and records of the time model's answers."""

import json

import pytest
from unit.estimate.time.cases import CPU, large, small

from eke.estimate.time import (
    Unknown,
    forecast_time,
    speed_cell,
    step_time_json,
    sum_line,
    time_line,
    time_rows,
)


@pytest.mark.parametrize(
    "overrides",
    [(), ("precision=fp8",), ("compile=inductor", "peft=lora"), ("data.lengths=uniform",)],
)
def test_estimate_is_labelled_and_fits_the_screen(overrides) -> None:
    found = forecast_time(small(*overrides))
    rows = dict(time_rows(found, 300, "cuda"))
    assert list(rows) == ["step", "speed", "total", "source"]
    for name, word in (("step", "limited by"), ("speed", "samples/s"), ("total", "GPU-hours")):
        assert word in rows[name]
    assert "estimate" in rows["source"]
    assert "not calibrated" in rows["source"]
    assert "estimate" in time_line(found)
    details = time_rows(found, 300, "cuda", details=True)
    assert [text for _, text in details if text.startswith("not exact: ")] == [
        f"not exact: {note}" for note in found.notes
    ]


def test_missing_estimate_names_the_required_runs() -> None:
    found = forecast_time(small(device=CPU))
    assert isinstance(found, Unknown)
    ((_, text),) = time_rows(found, 300, "cpu")
    assert "5 finished runs" in text
    assert text == time_line(found)
    assert speed_cell(found) == ""
    assert step_time_json(found)["timing"]["predicted_step_s"] is None


def test_json_uses_record_paths() -> None:
    plan = large()
    content = json.loads(json.dumps(step_time_json(forecast_time(plan))))
    step = content["timing"]["predicted_step_s"]
    assert step["low"] < step["expected"] < step["high"]
    rate = content["throughput"]["predicted_samples_per_s"]
    assert rate["expected"] == pytest.approx(4 / step["expected"])
    assert content["timing"]["predicted_device_hours"]["low"] > 0


def test_sweep_time_is_the_sum_of_its_runs() -> None:
    found = [forecast_time(large(f"batch.per_device={n}")) for n in (1, 2)]
    hours = sum(each.gpu_hours.expected for each in found)
    text = sum_line([*found, Unknown("nothing is known")], "cuda")
    assert f"about {hours:.2g} " in text
    assert "2 runs" in text
    assert "without an estimate: 1 run: nothing is known" in text
    assert sum_line([Unknown("x")], "cpu").startswith("without an estimate")
