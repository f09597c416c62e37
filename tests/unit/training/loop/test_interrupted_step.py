"""Being asked to stop within a step: it is given up at once, and taken again bit for bit."""

import pytest
from support import last_wins
from trained import BRIEF, continue_job, start_job, steps_of

from eke.plan.record import Outcome
from eke.training.loop.attempt import run_engine
from eke.training.loop.stop import Stopped

TYPED = (*BRIEF, "data.seq_len=8", "data.num_samples=64", "data.num_eval_samples=2",
         "batch.per_device=2", "batch.accumulation=3", "model.dropout=0.2")  # fmt: skip


def stop_at(job, number: int) -> list[str]:
    """Ask for a stop when forward pass `number` begins; the phases that were entered."""
    entered: list[str] = []
    enter = job.meter.enter

    def watched(phase: str) -> None:
        entered.append(phase)
        if entered.count("forward") == number:
            job.stop.outcome, job.stop.signal = Outcome.preempted, "SIGTERM"
        enter(phase)

    job.meter.enter = watched
    return entered


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "trainer"])
def test_unfinished_step_is_repeated(engine, make_plan, tmp_path) -> None:
    plan = make_plan(*last_wins(*TYPED, f"engine={engine}"))
    whole = start_job(plan, tmp_path / "whole")
    run_engine(whole)
    job = start_job(plan, tmp_path / "cut")
    entered = stop_at(job, 2 * 3 + 2)  # the second micro-batch of the third step
    with pytest.raises(Stopped, match="SIGTERM after step 2; checkpoint saved"):
        run_engine(job)
    assert entered.count("forward") == 2 * 3 + 2, "no micro-batch began after the signal"
    assert list(steps_of(job)) == [1, 2]
    resumed = continue_job(job, 2, tmp_path / "resumed")
    assert {**steps_of(job), **steps_of(resumed)} == steps_of(whole)


def test_interrupted_first_step_saves_no_checkpoint(make_plan, tmp_path) -> None:
    job = start_job(make_plan(*last_wins(*TYPED)), tmp_path / "first")
    stop_at(job, 1)
    with pytest.raises(Stopped, match="after step 0"):
        run_engine(job)
    assert not job.paths.checkpoints.exists()


@pytest.mark.parametrize(
    ("number", "every", "said", "kept"),
    [
        (2 * 3 + 2, "null", "step 2; no checkpoint saved", []),
        (3 * 3, "2", "step 3; no checkpoint saved", [2]),
        (3 * 3, "3", "step 3; checkpoint saved", [3]),
    ],
    ids=["within-a-step", "at-its-end-after-one", "due"],
)
def test_stop_without_saving_keeps_the_last_checkpoint(
    number, every, said, kept, make_plan, tmp_path
) -> None:
    never = ("train.save_on_signal=false", f"train.checkpoint_every={every}")
    job = start_job(make_plan(*last_wins(*TYPED, *never)), tmp_path / "stopped")
    stop_at(job, number)
    with pytest.raises(Stopped, match=said) as stopped:
        run_engine(job)
    assert stopped.value.outcome is Outcome.preempted
    assert sorted(int(p.name.split("-")[-1]) for p in job.paths.checkpoints.glob("*")) == kept
