"""The whole command on the device: its record, its allocator, events as clock, out of memory."""

import pytest
from live import record_of, run_folders
from on_device import BASE, ON, plan_here
from support import last_wins

from eke.plan.record import metrics

pytestmark = pytest.mark.gpu

HARDWARE = f"hardware={'cpu' if ON == 'cpu' else 'auto'}"


def test_record_holds_device_measurements(train_py, tmp_path) -> None:
    done = train_py(*BASE, HARDWARE)
    assert done.code == 0, done.text
    record = record_of(run_folders(tmp_path)[0])
    assert record["effective"]["device"].startswith(ON)
    memory = record["memory"]["measured"]
    assert memory["peak_allocated_bytes"] > 0
    stages = memory["stages"]
    assert 0 <= stages["empty"] <= stages["kernels_loaded"] <= stages["weights"]
    assert stages["training"] > 0
    assert record["timing"]["steady_step_s"]["median"] > 0
    assert set(record["timing"]["phases"]) == set(metrics.PHASES)
    if ON == "cuda":
        assert memory["peak_reserved_bytes"] >= memory["peak_allocated_bytes"]


def test_batch_that_does_not_fit_is_recorded_as_oom(train_py, tmp_path) -> None:
    if ON == "cpu":
        pytest.skip("a CPU has no allocator of its own to run out of memory: the host would swap")
    huge = ("model=bert_large", "task=masked_lm", "batch.per_device=8192", "data.seq_len=512")
    typed = last_wins(*BASE, *huge, "data.num_samples=8192", "ignore_forecast=true")
    plan_here(*typed)
    done = train_py(*typed)
    assert done.code == 1, done.text
    record = record_of(run_folders(tmp_path)[0])
    assert record["outcome"] == "oom"
    assert record["failure"]["phase"] in ("forward", "backward", "eval")
    assert "Traceback" not in done.text
