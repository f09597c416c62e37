"""`train.early_stop_patience`: where a run ends, in one process, in several, and after a stop."""

import json
import math

import pytest
from equivalence_cases import CASES, RAGGED
from support import TINY, last_wins
from trained import continue_job, record_of, train_job

from eke.plan.record import metrics

# A rate at which the evaluation loss soon rises.
RISING = (
    *CASES["causal_lm-llama"], *TINY, *RAGGED, "train.steps=30", "train.eval_every=2",
    "optimizer.lr=3e-2", "schedule=constant", "batch.per_device=12",
)  # fmt: skip
PATIENT = (*RISING, "train.early_stop_patience=2", "train.save_final=true")


def evaluations(path) -> list[tuple[int, float]]:
    rows, _ = metrics.read_rows(path)
    found = metrics.latest(rows, metrics.EVAL_LOSS)
    return [(row[metrics.STEP], row[metrics.EVAL_LOSS]) for row in found]


def expected_end(found: list[tuple[int, float]], patience: int) -> int:
    """Step of the first evaluation that is so many after the lowest one up to it."""
    best, since = math.inf, 0
    for step, loss in found:
        best, since = (loss, 0) if loss < best else (best, since + 1)
        if since == patience:
            return step
    return found[-1][0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Evaluations of the same run without patience."""
    from eke.config.compose import compose
    from eke.workflows.planning import plan_for

    typed = last_wins(*RISING, "hardware=cpu", "tracker=none")
    plan = plan_for(compose(typed), planning=False)
    return evaluations(train_job(plan, tmp_path_factory.mktemp("whole") / "run").paths.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "trainer"])
@pytest.mark.parametrize("patience", [1, 2])
def test_it_ends_after_so_many_evaluations_without_a_lower_loss(
    patience, engine, whole, make_plan, tmp_path
) -> None:
    end = expected_end(whole, patience)
    assert end < 30, "this run has to rise"
    typed = (*PATIENT, f"train.early_stop_patience={patience}", f"engine={engine}")
    job = train_job(make_plan(*last_wins(*typed)), tmp_path / "run")
    assert evaluations(job.paths.metrics) == [pair for pair in whole if pair[0] <= end]
    record = record_of(job)
    assert (record.outcome, record.steps_done) == ("ok", end)
    best, loss = min((p for p in whole if p[0] <= end), key=lambda pair: pair[1])
    found = {"best_step": best, "best_loss": loss, "patience": patience}
    assert record.effective["early_stop"] == found
    assert job.paths.exported(end).is_dir(), "its last weights are saved"


@pytest.mark.slow
def test_a_continued_run_ends_where_it_would_have(whole, make_plan, tmp_path) -> None:
    """Evaluations of the first attempt count."""
    end = expected_end(whole, 2)
    typed = (*PATIENT, "train.checkpoint_every=2", "train.keep_checkpoints=20")
    job = train_job(make_plan(*last_wins(*typed)), tmp_path / "first")
    (tmp_path / "second").mkdir()
    rows = (tmp_path / "first" / "metrics.jsonl").read_text()
    (tmp_path / "second" / "metrics.jsonl").write_text(rows)
    again = continue_job(job, end - 2, tmp_path / "second")
    assert again.start_step == end - 2
    assert record_of(again).steps_done == end
    assert evaluations(again.paths.metrics) == [pair for pair in whole if pair[0] <= end]


@pytest.mark.slow
def test_two_processes_end_together(whole, train_ranks) -> None:
    end = expected_end(whole, 2)
    folder = train_ranks(*PATIENT, "distributed=ddp", "batch.per_device=6")
    record = json.loads((folder / "record.json").read_text())
    assert (record["outcome"], record["steps_done"]) == ("ok", end)


@pytest.mark.slow
def test_without_a_rise_it_takes_all_steps(make_plan, tmp_path) -> None:
    typed = (*PATIENT, "train.steps=6", "optimizer.lr=1e-3", "train.early_stop_patience=3")
    job = train_job(make_plan(*last_wins(*typed)), tmp_path / "run")
    assert record_of(job).steps_done == 6
    assert "early_stop" not in job.effective
