"""The record of an attempt: from rows and running objects, with nothing that was not measured."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from trained import BRIEF, changed, start_job
from unit.plan.cases import plan_of
from unit.plan.record.samples import eval_row, step_row

from eke.common.paths import RunPaths
from eke.plan.record import Failure, Outcome, metrics, read_record, write_record
from eke.training.loop.evaluation import row_of_loss
from eke.training.loop.loop import train
from eke.training.loop.results import effective, make_record, measured_memory


@pytest.fixture(scope="module")
def plan():
    return plan_of(*BRIEF, "precision=fp16")


@pytest.fixture(scope="module")
def job(plan, tmp_path_factory):
    """A real training of four steps."""
    job = start_job(plan, tmp_path_factory.mktemp("run"))
    job.stages["empty"] = 5
    train(job)
    return job


def test_finished_attempt_is_recorded(job, plan) -> None:
    record = make_record(plan, job.paths, 0, Outcome.ok, None, job)
    assert (record.outcome, record.exit_code, record.steps_done) == ("ok", 0, 4)
    assert record.timing.steady_step_s.n == 2
    assert len(record.timing.warmup_steps_s) == 2
    assert record.timing.eval_s == job.eval_s > 0
    assert record.timing.compile_s is None
    assert record.environment["host"]
    rows, _ = metrics.read_rows(job.paths.metrics)
    last = metrics.latest(rows, metrics.LOSS)[-1]
    assert record.loss.train_final == last[metrics.LOSS]
    write_record(job.paths, record)
    assert read_record(job.paths).effective == record.effective


def test_recorded_memory_matches_measurement(job) -> None:
    memory = measured_memory(job)
    parameters = sum(p.numel() for p in job.parameters)
    assert memory.peak_allocated_bytes == job.profiled_peak > 16 * parameters
    assert memory.peak_reserved_bytes is None, "a CPU reserves nothing"
    assert memory.process_peak_bytes > memory.peak_allocated_bytes
    assert memory.stages["empty"] == 5
    assert "CPU tensor allocator" in memory.basis


def test_effective_settings_come_from_running_objects(job) -> None:
    seen = effective(job)
    assert seen["device"] == "cpu"
    assert "float16" in seen["matmul_dtypes"]
    assert seen["loss_scale"] == job.formats.scaler.get_scale()
    assert seen["optimizer"] == "AdamW"
    assert "compile" not in seen
    assert "loss_scale" not in job.effective, "reading adds nothing to the job"


def test_run_without_scaler_has_no_scale(job) -> None:
    unscaled = changed(job, formats=dataclasses.replace(job.formats, scaler=None))
    assert "loss_scale" not in effective(unscaled)


class Unreadable:
    """A loss scaler on a GPU whose context an error has ended: nothing can be read there."""

    def get_scale(self) -> float:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def test_unreadable_scale_does_not_lose_the_record(job, plan) -> None:
    ended = changed(job, formats=dataclasses.replace(job.formats, scaler=Unreadable()))
    failure = Failure("forward", "AcceleratorError: CUDA error: device-side assert triggered")
    record = make_record(plan, job.paths, 0, Outcome.crashed, failure, ended)
    assert (record.outcome, record.failure, record.steps_done) == ("crashed", failure, 4)
    assert "loss_scale" not in record.effective
    assert record.effective["skipped_steps"] == 0


def test_run_warnings_follow_plan_warnings(job, plan) -> None:
    warned = changed(job, warnings=["no effect"])
    planned = dataclasses.replace(plan, warnings=("careful",))
    record = make_record(planned, job.paths, 0, Outcome.ok, None, warned)
    assert record.warnings == ["careful", "no effect"]


def test_attempt_that_died_while_building_is_recorded(plan, tmp_path) -> None:
    failure = Failure("build", "RuntimeError: no GPU", "Traceback ...")
    record = make_record(plan, RunPaths(tmp_path), 0, Outcome.crashed, failure, None)
    assert (record.outcome, record.steps_done, record.failure) == ("crashed", 0, failure)
    assert record.memory.measured is None
    assert record.effective == {}
    assert record.timing.eval_s is None


def test_torn_lines_are_reported(plan, tmp_path) -> None:
    paths = RunPaths(tmp_path)
    metrics.append_rows(paths.metrics, [eval_row(0, 5.0), step_row(1)])
    with open(paths.metrics, "ab") as file:
        file.write(b'{"train/loss": 1')
    record = make_record(plan, paths, 0, Outcome.preempted, None, None)
    assert [warning.split()[0] for warning in record.warnings] == ["1"]
    assert record.steps_done == 1


def test_unknown_compile_counters_do_not_lose_the_record(job, plan, monkeypatch) -> None:
    """What a newer PyTorch may do to a run that has trained to its end."""
    compiled = dataclasses.replace(plan.config, compile=plan_of("compile=inductor").config.compile)
    own = changed(job, plan=dataclasses.replace(plan, config=compiled), warnings=[])
    monkeypatch.delattr("torch._dynamo.utils.get_compilation_metrics")
    record = make_record(own.plan, own.paths, 0, Outcome.ok, None, own)
    assert record.outcome == "ok"
    assert "compile" not in record.effective
    assert any("compiler report" in each for each in record.warnings)


@pytest.mark.parametrize("bytes_are_tokens", [True, False])
def test_nats_per_byte_are_converted_to_bits(bytes_are_tokens) -> None:
    data = SimpleNamespace(bytes_are_tokens=bytes_are_tokens)
    job = SimpleNamespace(plan=plan_of(), data=data)
    row = row_of_loss(job, math.log(4))
    assert row[metrics.EVAL_LOSS] == math.log(4)
    assert row.get(metrics.BITS_PER_BYTE) == (pytest.approx(2) if bytes_are_tokens else None)
