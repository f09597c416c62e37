"""A classifier's metrics are those of its own predictions, however many processes make them."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from equivalence_cases import CASES, RAGGED
from support import TINY, last_wins
from trained import record_of, train_job

from eke.plan.record import metrics
from eke.results.report.show.sections import _classes
from eke.training.loop.classification import classification_metrics

SHORT = ("train.steps=6", "train.eval_every=3", "data.num_eval_samples=23")
BERT = (*CASES["classification-bert"], *TINY, *RAGGED, *SHORT)


def evaluations(path) -> list[dict]:
    rows, unreadable = metrics.read_rows(path)
    assert unreadable == 0
    return metrics.latest(rows, metrics.EVAL_LOSS)


def test_values_are_those_computed_by_hand() -> None:
    """Three of four classes; `b` is never predicted, `d` never right."""
    right = [0, 0, 0, 0, 0, 0, 1, 1, 2, 2]
    found = [0, 0, 0, 0, 2, 3, 0, 2, 2, 0]
    row, classes = classification_metrics(found, right, ["a", "b", "c", "d"])
    of_a, of_c = 2 * 4 / (6 + 6), 2 * 1 / (3 + 2)  # twice the hits over what is right and found
    assert row["eval/accuracy"] == pytest.approx(5 / 10)
    assert row["eval/f1_micro"] == pytest.approx(5 / 10)
    assert row["eval/f1_macro"] == pytest.approx((of_a + 0 + of_c + 0) / 4)
    assert classes["f1"] == pytest.approx([of_a, 0, of_c, 0])
    assert classes["support"] == [6, 2, 2, 0]
    assert classes["confusion"] == [[4, 0, 1, 1], [1, 0, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    json.dumps(classes)


def test_a_class_that_nothing_has_is_not_in_the_mean() -> None:
    row, _ = classification_metrics([0, 1], [0, 1], ["a", "b", "c"])
    assert row["eval/f1_macro"] == 1


def test_many_classes_have_no_matrix() -> None:
    _, classes = classification_metrics([0], [0], [str(n) for n in range(101)])
    assert "confusion" not in classes
    assert len(classes["support"]) == 101


@pytest.mark.parametrize(
    "classes",
    [
        {},
        {"names": 3},
        {"names": ["a"], "confusion": [[1], [2]]},
        {"names": ["a", "b"], "confusion": 5},
        {"names": ["a"], "confusion": [[1, 2]], "precision": [1], "recall": [1], "f1": [1]},
        {"names": ["a"], "confusion": [[1]], "precision": ["x"], "recall": [1], "f1": [1]},
    ],
    ids=range(6),
)
def test_a_report_leaves_out_what_no_run_of_ours_wrote(classes) -> None:
    variant = SimpleNamespace(label="x", records=[SimpleNamespace(classes=classes)])
    assert _classes(SimpleNamespace(variant=variant)).rows == ()


@pytest.mark.parametrize("engine", ["loop", pytest.param("trainer", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["bert", pytest.param("llama", marks=pytest.mark.slow)])
def test_the_record_has_what_the_model_predicts(engine, model, make_plan, tmp_path) -> None:
    base = (*CASES[f"classification-{model}"], *TINY, *RAGGED, *SHORT, f"engine={engine}")
    job = train_job(make_plan(*last_wins(*base)), tmp_path / "run")
    found, right = [], []
    job.model.eval()
    with torch.no_grad():
        for batch in job.data.eval_batches(0, False):
            found += job.bare_model(**batch.inputs).logits.argmax(-1).tolist()
            right += batch.labels.tolist()
    assert len(right) == 23
    record = record_of(job)
    share = sum(a == b for a, b in zip(found, right, strict=True)) / 23
    assert record.metrics["accuracy"] == pytest.approx(share)
    assert sum(record.classes["support"]) == 23
    counted = torch.tensor(record.classes["confusion"])
    assert [counted[a, b] for a, b in zip(right, found, strict=True)].count(0) == 0
    assert counted.sum() == 23
    every = evaluations(job.paths.metrics)
    assert [row[metrics.STEP] for row in every] == [0, 3, 6]
    assert all(0 <= row["eval/accuracy"] <= 1 for row in every)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_two_processes_count_each_sample_once(strategy, make_plan, train_ranks, tmp_path) -> None:
    """23 samples: the last micro-batch of one of them is a placeholder."""
    alone = train_job(make_plan(*last_wins(*BERT, "batch.per_device=12")), tmp_path / "alone")
    folder = train_ranks(*BERT, f"distributed={strategy}", "batch.per_device=6")
    record = json.loads((folder / "record.json").read_text())
    assert record["classes"] == record_of(alone).classes
    for one, two in zip(
        evaluations(alone.paths.metrics), evaluations(folder / "metrics.jsonl"), strict=True
    ):
        assert one["eval/accuracy"] == two["eval/accuracy"]
        assert one["eval/f1_macro"] == two["eval/f1_macro"]


def test_a_language_model_has_a_perplexity(make_plan, tmp_path) -> None:
    base = (*CASES["causal_lm-llama"], *TINY, *RAGGED, "train.steps=2")
    job = train_job(make_plan(*last_wins(*base)), tmp_path / "run")
    record = record_of(job)
    assert record.loss.eval_final is not None
    assert record.metrics["perplexity"] == pytest.approx(math.exp(record.loss.eval_final))
    assert record.classes == {}
