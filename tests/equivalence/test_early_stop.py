"""`train.early_stop_patience` and `train.keep_best`: where a run ends, and which weights it leaves,
in one process, in several, and after a stop."""

import json
import math

import pytest
import torch
from equivalence_cases import CASES, RAGGED
from safetensors.torch import load_file
from support import TINY, last_wins
from trained import continue_job, record_of, train_job

from eke.common.text import IGNORED
from eke.plan.record import Best, metrics
from eke.results.card import render_card

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
@pytest.mark.parametrize(("patience", "engine"), [(1, "trainer"), (2, "loop")])
def test_run_stops_after_evaluations_without_improvement(
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
    found = {"metric": "loss", "step": best, "value": loss, "patience": patience}
    assert record.effective["early_stop"] == found
    assert job.paths.exported(end).is_dir(), "its last weights are saved"


@pytest.mark.slow
def test_resumed_run_stops_at_the_same_step(whole, make_plan, tmp_path) -> None:
    """Evaluations of the first attempt count, and the best may be one of them."""
    end = expected_end(whole, 2)
    typed = (*PATIENT, "train.checkpoint_every=2", "train.keep_checkpoints=20")
    typed = (*typed, "train.keep_best=loss")
    job = train_job(make_plan(*last_wins(*typed)), tmp_path / "first")
    (tmp_path / "second").mkdir()
    rows = (tmp_path / "first" / "metrics.jsonl").read_text()
    (tmp_path / "second" / "metrics.jsonl").write_text(rows)
    again = continue_job(job, end - 2, tmp_path / "second")
    assert again.start_step == end - 2
    assert record_of(again).steps_done == end
    assert record_of(again).best == Best("loss", *best_of(job.paths.metrics))
    assert evaluations(again.paths.metrics) == [pair for pair in whole if pair[0] <= end]


@pytest.mark.slow
def test_improving_run_takes_all_steps(make_plan, tmp_path) -> None:
    typed = (*PATIENT, "train.steps=6", "optimizer.lr=1e-3", "train.early_stop_patience=3")
    job = train_job(make_plan(*last_wins(*typed)), tmp_path / "run")
    assert record_of(job).steps_done == 6
    assert "early_stop" not in job.effective


BEST = (
    *RISING, "train.steps=12", "schedule.warmup_steps=0", "train.keep_best=loss",
    "train.checkpoint_every=2", "train.keep_checkpoints=1", "train.save_final=true",
)  # fmt: skip


def best_of(path) -> tuple[int, float]:
    """Of the evaluations after the first step."""
    return min((pair for pair in evaluations(path) if pair[0]), key=lambda pair: pair[1])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "trainer"])
def test_weights_of_the_best_evaluation_are_saved(engine, make_plan, tmp_path) -> None:
    job = train_job(make_plan(*last_wins(*BEST, f"engine={engine}")), tmp_path / "run")
    step, loss = best_of(job.paths.metrics)
    assert step < 10, "others came after it"
    record = record_of(job)
    assert record.best == Best("loss", step, loss)
    assert (record.steps_done, record.model_step, record.loss.eval_final) == (12, step, loss)
    kept = sorted(path.name for path in job.paths.checkpoints.iterdir())
    assert kept == [f"step-{step:08d}", "step-00000012"], "the newest, to continue from, and it"
    short = (*BEST, f"train.steps={step}", f"engine={engine}")
    other = train_job(make_plan(*last_wins(*short)), tmp_path / "short")
    mine, its = (load_file(each.paths.model / "model.safetensors") for each in (job, other))
    assert all(mine[name].equal(its[name]) for name in its)
    assert f"of step {step}, the best loss" in render_card(record)


@pytest.mark.slow
def test_two_processes_stop_together_with_the_same_best(whole, train_ranks) -> None:
    end = expected_end(whole, 2)
    kept = ("train.keep_best=loss", "train.checkpoint_every=2", "train.keep_checkpoints=1")
    folder = train_ranks(*PATIENT, *kept, "distributed=ddp", "batch.per_device=6")
    record = json.loads((folder / "record.json").read_text())
    assert (record["outcome"], record["steps_done"]) == ("ok", end)
    best, _ = best_of(folder / "metrics.jsonl")
    assert record["best"]["step"] == best
    assert (folder / "model").resolve().parent.name == f"step-{best:08d}"


def test_metric_direction_and_nan_are_respected() -> None:
    rows = [
        {metrics.STEP: step, metrics.EVAL_LOSS: loss, "eval/accuracy": accuracy}
        for step, loss, accuracy in [(0, 0.1, 1.0), (2, 0.9, 0.5), (4, math.nan, 0.8), (6, 1, 0.8)]
    ]
    assert metrics.best_evaluation(rows, "loss") == Best("loss", 2, 0.9)
    assert metrics.best_evaluation(rows, "accuracy") == Best("accuracy", 4, 0.8)
    assert metrics.best_evaluation(rows, None) is None


def test_unknown_metric_never_selects_a_checkpoint() -> None:
    rows = [{metrics.STEP: 2, metrics.EVAL_LOSS: 0.9}]
    assert metrics.best_evaluation(rows, "f1_macro") is None


@pytest.mark.slow
def test_token_accuracy_counts_argmax_hits(make_plan, tmp_path) -> None:
    """By hand, on the model that the run left."""
    typed = last_wins(*BEST, "train.steps=2", "train.keep_best=null")
    job = train_job(make_plan(*typed), tmp_path / "run")
    job.model.eval()
    hits = total = 0
    with torch.no_grad():
        for batch in job.data.eval_batches():
            counted = batch.labels != IGNORED
            found = job.model(**batch.inputs).logits.argmax(-1)
            hits += int((found == batch.labels)[counted].sum())
            total += int(counted.sum())
    assert record_of(job).metrics["token_accuracy"] == pytest.approx(hits / total)
