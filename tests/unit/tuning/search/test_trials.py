"""What is typed for a trial, and what its record says."""

import math
from types import SimpleNamespace

import pytest
from unit.results.report.made import Run, make_record

from eke.config.compose import compose
from eke.plan.record import Failure, Outcome, Spread
from eke.tuning.search.render_result import describe_trial
from eke.tuning.search.search import is_higher, measured, trial_overrides

TYPED = ("model=tiny", "train.steps=5000", "train.epochs=null", "batch=auto", "batch.target=32",
         "schedule.warmup_steps=100", "train.checkpoint_every=10", "plan_only=true")  # fmt: skip
CANDIDATE = ("compile=inductor", "batch.per_device=4", "batch.target=32", "batch.accumulation=null")
CANDIDATE_POINT = SimpleNamespace(point=SimpleNamespace(expected_s=None))


def test_trial_is_short_and_saves_no_checkpoint():
    config = compose(trial_overrides(TYPED, CANDIDATE, 0), in_sweep=True).config
    assert config.train.steps == 20
    assert config.train.checkpoint_every is None
    assert not config.train.save_final
    assert config.batch.per_device == 4
    assert not config.plan_only
    assert config.repeat == 0
    assert compose(trial_overrides(TYPED, CANDIDATE, 1), in_sweep=True).config.repeat == 1


@pytest.fixture
def record():
    made = make_record("a" * 16, Run({}, speed=10.0, peak=2**20))
    made.timing.steady_step_s = Spread(median=0.1, p10=0.09, p90=0.11, n=15)
    return made


def test_compile_time_is_divided_over_the_run(record):
    record.timing.compile_s = 50.0
    found = measured(3, 0, record, "runs/a", total_steps=1000, on_gpu=False)
    assert found.trial.step_s == pytest.approx(0.1 + 0.05)
    assert found.trial.compiling_s == pytest.approx(0.05)
    assert found.steady_s == 0.1
    assert describe_trial(found, CANDIDATE_POINT).startswith("100 ms per step")
    deviation = 0.02 / (2 * 1.2816) / 0.1
    median = math.sqrt(math.pi / 2) * deviation / math.sqrt(15)
    assert found.trial.spread == pytest.approx(median, rel=1e-3)


def test_trial_peak_is_comparable_with_the_forecast(record):
    record.memory.measured.peak_allocated_bytes = 10
    record.memory.measured.peak_reserved_bytes = 20
    assert measured(0, 0, record, "", 10, on_gpu=False).trial.peak_bytes == 10
    assert measured(0, 0, record, "", 10, on_gpu=True).trial.peak_bytes == 20


def test_oom_trial_is_distinguished_from_a_crash(record):
    for outcome, ran_out in ((Outcome.oom, True), (Outcome.crashed, False)):
        record.outcome = outcome.name
        record.failure = Failure("forward", "it broke")
        found = measured(0, 0, record, "", 10, on_gpu=False)
        assert (found.trial.step_s, found.trial.ran_out) == (None, ran_out)
        assert found.reason == "it broke"


def test_loss_one_percent_higher_is_worse():
    assert is_higher(1.02, 1.0)
    assert not is_higher(1.005, 1.0)
    assert not is_higher(0.5, 1.0)
    assert not is_higher(None, 1.0)
    assert not is_higher(1.0, None)
