"""The trial of a run's memory: what it does, what it leaves out, and how its end is read."""

import signal
from types import SimpleNamespace

import pytest
from unit.plan.cases import SYNTHETIC, plan_of

from eke.common.paths import RunPaths
from eke.launch.processes.run_attempt import _probe_outcome, trial_of
from eke.plan.record import DeadRank, Failure, write_end


@pytest.mark.parametrize(
    ("typed", "accumulation"),
    [(("batch.per_device=4",), 1), (("batch.per_device=4", "batch.target=64"), 2)],
    ids=["one", "sixteen"],
)
def test_trial_has_two_steps_of_at_most_two_micro_batches(typed, accumulation) -> None:
    trial = trial_of(plan_of(*SYNTHETIC, *typed))
    assert trial.probe
    assert (trial.batch.per_device, trial.batch.accumulation) == (4, accumulation)
    assert trial.steps.total == 2
    assert trial.steps.num_train_samples == 2 * trial.batch.samples_per_step
    assert trial.steps.num_eval_samples == 4, "one micro-batch of evaluation"


def test_memory_trial_disables_tracker_and_checkpoints() -> None:
    plan = plan_of(*SYNTHETIC, "tracker=wandb")
    config = trial_of(plan).config
    assert config.tracker.option == "none"
    assert config.train.checkpoint_every is None
    assert not config.train.save_final
    assert plan.config.tracker.option == "wandb", "the run's own plan stays as it is"


def test_deepspeed_settings_match_the_memory_trial() -> None:
    two = ("distributed=zero2", "distributed.num_processes=2")
    trial = trial_of(plan_of(*SYNTHETIC, *two, "batch.per_device=2", "batch.target=32"))
    assert trial.deepspeed is not None
    assert trial.deepspeed["gradient_accumulation_steps"] == 2


def test_run_is_not_a_trial() -> None:
    assert not plan_of(*SYNTHETIC).probe


@pytest.mark.parametrize(
    ("outcome", "exit_code", "fits"),
    [
        pytest.param("ok", 0, True, id="ok"),
        pytest.param("oom", 1, False, id="out of memory"),
        pytest.param("crashed", -signal.SIGKILL, False, id="killed"),
        pytest.param("crashed", -signal.SIGSEGV, None, id="crashed"),
        pytest.param("crashed", 1, None, id="failed"),
        pytest.param("diverged", 1, None, id="diverged"),
    ],
)
def test_trial_outcome_is_read(tmp_path, outcome, exit_code, fits) -> None:
    failure = None if outcome == "ok" else Failure("forward", "what it said")
    record = SimpleNamespace(outcome=outcome, failure=failure, attempt=0)
    found = _probe_outcome(record, RunPaths(tmp_path), exit_code)
    assert found.fits is fits
    assert bool(found.reason) == (outcome != "ok")


def test_killed_rank_of_a_trial_ran_out_of_memory(tmp_path) -> None:
    paths = RunPaths(tmp_path)
    write_end(paths, DeadRank(0, 1, -signal.SIGKILL, 0))
    record = SimpleNamespace(outcome="crashed", failure=Failure("worker", "gone"), attempt=0)
    assert _probe_outcome(record, paths, 1).fits is False
