"""A classifier's metrics by hand; test_problem_types.py has those of trained models."""

import json
import math
from types import SimpleNamespace

import pytest
from equivalence_cases import CASES, RAGGED
from support import TINY, last_wins
from trained import record_of, train_job

from eke.results.report.show.report_sections import _classes
from eke.training.loop.classification import classification_metrics


def test_metrics_match_hand_computed_values() -> None:
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


def test_absent_class_is_excluded_from_macro_f1() -> None:
    row, _ = classification_metrics([0, 1], [0, 1], ["a", "b", "c"])
    assert row["eval/f1_macro"] == 1


def test_many_classes_have_no_confusion_matrix() -> None:
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
def test_report_omits_foreign_class_records(classes) -> None:
    variant = SimpleNamespace(label="x", records=[SimpleNamespace(classes=classes)])
    assert _classes(SimpleNamespace(variant=variant)).rows == ()


def test_language_model_has_a_perplexity(make_plan, tmp_path) -> None:
    base = (*CASES["causal_lm-llama"], *TINY, *RAGGED, "train.steps=2")
    job = train_job(make_plan(*last_wins(*base)), tmp_path / "run")
    record = record_of(job)
    assert record.loss.eval_final is not None
    assert record.metrics["perplexity"] == pytest.approx(math.exp(record.loss.eval_final))
    assert record.classes == {}
