"""`task.problem` and pairs of texts: plain transformers and scikit-learn say what is right."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from equivalence_cases import RAGGED
from memory_truth import COMMON, Case, measured_apart, plan_of, step_peak
from prepared import write_jsonl
from scipy import stats
from sklearn import metrics as sk
from support import TINY, last_wins
from tokenizer_kinds import save_kind
from trained import continue_job, record_of, steps_of, train_job
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from eke.estimate.memory.trace_client import get_or_run_trace
from eke.plan.record import metrics
from eke.results.report.show.report_sections import _classes
from eke.training.batches.dataset import build_data
from eke.training.loop.classification import classification_metrics
from eke.training.model.build_model import build_model
from eke.training.model.loss import loss_sum

CPU = torch.device("cpu")
PROBLEMS = {
    "single": ("task.num_labels=3",),
    "multi_label": ("task.problem=multi_label", "task.num_labels=3"),
    "regression": ("task.problem=regression",),
}
MODELS = {"bert": "model=tiny_bert", "llama": "model=tiny", "gpt2": "model=tiny_gpt2",
          "t5": "model=tiny_t5"}  # fmt: skip
SHORT = ("train.steps=6", "train.eval_every=3", "data.num_eval_samples=23")


def typed(problem: str, *more: str, model: str = "bert") -> tuple[str, ...]:
    task = (MODELS[model], "task=sequence_classification", *PROBLEMS[problem])
    return last_wins(*task, *TINY, *RAGGED, *SHORT, *more)


def curve(job) -> list[float]:
    rows, _ = metrics.read_rows(job.paths.metrics)
    return [row[metrics.LOSS] for row in metrics.latest(rows, metrics.LOSS)]


def evaluations(path) -> list[dict]:
    rows, _ = metrics.read_rows(path)
    return [
        {k: v for k, v in row.items() if k.startswith("eval/")}
        for row in metrics.latest(rows, metrics.EVAL_LOSS)
    ]


@pytest.fixture(scope="module")
def known_jobs() -> dict:
    return {}


@pytest.fixture
def whole(known_jobs, make_plan, tmp_path_factory):
    """Problem -> a run with its checkpoints that no test changes."""

    def run(problem: str):
        if problem not in known_jobs:
            saved = ("batch.per_device=12", "train.checkpoint_every=2", "train.keep_checkpoints=9")
            folder = tmp_path_factory.mktemp("whole") / "run"
            known_jobs[problem] = train_job(make_plan(*typed(problem, *saved)), folder)
        return known_jobs[problem]

    return run


@pytest.mark.parametrize(
    ("model", "problem"),
    [*(("bert", problem) for problem in PROBLEMS),
     ("llama", "regression"), ("gpt2", "multi_label"), ("t5", "single")],
)  # fmt: skip
def test_loss_and_gradients_match_transformers(problem, model, make_plan) -> None:
    plan = make_plan(*typed(problem, "batch.per_device=5", model=model))
    mine, plain = (build_model(plan, CPU) for _ in range(2))
    batch = build_data(plan).collate([build_data(plan).train[0, n] for n in range(5)])
    assert plain.config.num_labels == (1 if problem == "regression" else 3)
    right = plain(**batch.inputs, labels=batch.labels).loss  # as its config's problem_type says
    right.backward()
    loss = loss_sum(mine(**batch.inputs).logits, batch.labels) / batch.num_targets
    loss.backward()
    torch.testing.assert_close(loss, right)
    for one, two in zip(mine.parameters(), plain.parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(one.grad, two.grad)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_ignored_label_has_no_loss_and_no_gradient(problem, make_plan) -> None:
    plan = make_plan(*typed(problem))
    (batch,) = build_data(plan).placeholders(1)
    model = build_model(plan, CPU)
    loss = loss_sum(model(**batch.inputs).logits, batch.labels)
    loss.backward()
    assert (loss.item(), batch.num_targets) == (0, 0)
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_regression_label_may_equal_ignore_index(make_plan) -> None:
    """-100 is IGNORED among classes; a regression may well have it."""
    collate = build_data(make_plan(*typed("regression"))).collate
    sample = {"input_ids": np.array([9, 9]), "labels": np.asarray(-100, np.float32)}
    batch = collate([sample])
    assert batch.num_targets == 1
    assert float(loss_sum(torch.zeros(1, 1), batch.labels)) == 10_000


@pytest.mark.parametrize("problem", ["multi_label", "regression"])
def test_micro_batch_size_does_not_change_training(problem, whole, make_plan, tmp_path) -> None:
    cut = ("batch.per_device=4", "batch.accumulation=3", "batch.eval_per_device=5")
    parts = train_job(make_plan(*typed(problem, *cut)), tmp_path / "parts")
    assert curve(parts) == pytest.approx(curve(whole(problem)), rel=1e-5)
    for one, two in zip(
        evaluations(whole(problem).paths.metrics), evaluations(parts.paths.metrics), strict=True
    ):
        assert one == pytest.approx(two, rel=1e-3)


@pytest.mark.parametrize("problem", ["multi_label", "regression"])
def test_trainer_agrees_with_the_loop(problem, whole, make_plan, tmp_path) -> None:
    overrides = typed(problem, "engine=trainer", "batch.per_device=12")
    job = train_job(make_plan(*overrides), tmp_path / "trainer")
    assert curve(job) == curve(whole(problem))
    assert record_of(job).metrics == record_of(whole(problem)).metrics
    assert record_of(job).classes == record_of(whole(problem)).classes


@pytest.mark.parametrize("problem", ["multi_label", "regression"])
def test_resumed_run_is_bit_exact(problem, whole, tmp_path) -> None:
    rest = continue_job(whole(problem), 4, tmp_path / "rest")
    assert steps_of(rest) == {n: v for n, v in steps_of(whole(problem)).items() if n > 4}
    assert record_of(rest).metrics == record_of(whole(problem)).metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "strategy"), [("single", "fsdp"), ("multi_label", "ddp"), ("regression", "zero2")]
)
def test_two_processes_match_one(problem, strategy, whole, train_ranks) -> None:
    """31 and 23 samples: the last micro-batches of a rank are placeholders."""
    alone = whole(problem)
    folder = train_ranks(*typed(problem, "batch.per_device=6"), f"distributed={strategy}")
    rows, _ = metrics.read_rows(folder / "metrics.jsonl")
    losses = [row[metrics.LOSS] for row in metrics.latest(rows, metrics.LOSS)]
    assert losses == pytest.approx(curve(alone), rel=1e-4)
    record = json.loads((folder / "record.json").read_text())
    assert record["metrics"] == pytest.approx(record_of(alone).metrics, rel=1e-2)
    assert record["classes"].get("support") == record_of(alone).classes.get("support")
    if problem == "single":  # each sample is counted once
        assert record["classes"] == record_of(alone).classes
        every = [evaluations(path) for path in (alone.paths.metrics, folder / "metrics.jsonl")]
        accuracies = [[row["eval/accuracy"] for row in rows] for rows in every]
        assert accuracies[0] == accuracies[1]


WORDS = ["cat", "dog", "bird", "question", "fine"]


def rows_of(problem: str, pairs: bool) -> list[dict]:
    """The label is the first word, the set of animals, or the number of words."""
    draw = np.random.default_rng(0)
    rows = []
    for number in range(90):
        words = draw.choice(WORDS, draw.integers(1, 9)).tolist()
        classes = sorted({w for w in words if w in WORDS[:3]})
        label = {"single": words[0], "multi_label": classes, "regression": len(words) / 4 - 1}
        second = {"b": " ".join(words[::-1])} if pairs else {}
        rows.append({"text": f"{' '.join(words)} {number}", **second, "label": label[problem]})
    return rows


@pytest.fixture
def own_rows(tmp_path, prepared_here):
    """Overrides for rows of a problem, and the rows to evaluate on."""
    names = ["input_ids", "token_type_ids", "attention_mask"]
    folder = save_kind(tmp_path / "tokenizer", "wordpiece without bos", model_input_names=names)

    def make(problem: str, pairs: bool):
        rows = rows_of(problem, pairs)
        data = [write_jsonl(tmp_path / "t.jsonl", rows[:60]),
                write_jsonl(tmp_path / "e.jsonl", rows[60:])]  # fmt: skip
        labels = [r for r in PROBLEMS[problem] if "num_labels" not in r]
        count = {"single": 5, "multi_label": 3, "regression": 1}[problem]
        return rows[60:], (
            MODELS["bert"], "task=sequence_classification", *labels, f"task.num_labels={count}",
            *TINY, "data=jsonl", f"data.path={data[0]}", f"data.eval_path={data[1]}",
            f"data.tokenizer={folder}", "data.seq_len=16", "data.num_eval_samples=30",
            "train.steps=30", "optimizer.lr=3e-3", "train.save_final=true",
            *(("data.text_pair=b",) if pairs else ()),
        )  # fmt: skip

    return make


def outputs_of_plain_transformers(folder, rows: list[dict]) -> tuple[torch.nn.Module, torch.Tensor]:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [[row["text"] for row in rows], *([[r["b"] for r in rows]] if "b" in rows[0] else [])]
    cut = {"truncation": "longest_first", "max_length": 16, "padding": True}
    with torch.no_grad():
        return model, model(**tokenizer(*texts, **cut, return_tensors="pt")).logits


@pytest.mark.parametrize(
    ("problem", "pairs"), [("single", True), ("multi_label", False), ("regression", False)],
    ids=PROBLEMS,
)  # fmt: skip
def test_saved_model_has_the_recorded_metrics(
    problem, pairs, own_rows, make_plan, tmp_path
) -> None:
    """By plain transformers and scikit-learn; and a pipeline reads what the scores are."""
    rows, overrides = own_rows(problem, pairs)
    job = train_job(make_plan(*overrides), tmp_path / "run")
    record = record_of(job)
    model, logits = outputs_of_plain_transformers(job.paths.model, rows)
    names, labels = model.config.id2label, [row["label"] for row in rows]
    if problem == "single":
        found = [names[n] for n in logits.argmax(-1).tolist()]
        right = {"accuracy": sk.accuracy_score(labels, found)}
        matrix = sk.confusion_matrix(labels, found, labels=list(names.values()))
        assert record.classes["confusion"] == matrix.tolist()
        assert record.classes["support"] == matrix.sum(axis=1).tolist()
        target = torch.tensor([model.config.label2id[label] for label in labels])
    elif problem == "multi_label":
        target = torch.tensor([[float(names[n] in row) for n in range(3)] for row in labels])
        found = (logits.sigmoid() > 0.5).numpy()
        right = {
            "accuracy": sk.accuracy_score(target.numpy(), found),
            "f1_macro": sk.f1_score(target.numpy(), found, average="macro", zero_division=0),
            "f1_micro": sk.f1_score(target.numpy(), found, average="micro", zero_division=0),
        }
        each = sk.precision_recall_fscore_support(target.numpy(), found, zero_division=0)
        assert record.classes["names"] == list(names.values()) == WORDS[2:3] + WORDS[:2]
        for name, values in zip(("precision", "recall", "f1", "support"), each, strict=True):
            assert record.classes[name] == pytest.approx(values.tolist())
    else:
        target, found = torch.tensor(labels), logits[:, 0].numpy()
        right = {
            "mae": np.abs(found - labels).mean(), "mse": ((found - labels) ** 2).mean(),
            "r2": 1 - ((found - labels) ** 2).sum() / ((labels - np.mean(labels)) ** 2).sum(),
            "pearson": np.corrcoef(found, labels)[0, 1],
            "spearman": stats.spearmanr(found, labels).statistic,
        }  # fmt: skip
        assert record.metrics.keys() == right.keys()
        assert record.metrics["pearson"] > 0.5, "it learns to count words"
    # Two samples have the same tokens; rounding may part their ranks, which changes it by 1e-4.
    ranks = pytest.approx(right.pop("spearman", None), abs=5e-4)
    assert record.metrics.get("spearman") == ranks
    assert {k: record.metrics[k] for k in right} == pytest.approx(right, rel=1e-4)
    plain = {
        "single": torch.nn.CrossEntropyLoss(),
        "multi_label": torch.nn.BCEWithLogitsLoss(),
        "regression": torch.nn.MSELoss(),
    }[problem]
    loss = plain(logits[:, 0] if problem == "regression" else logits, target)
    assert record.loss.eval_final == pytest.approx(float(loss), rel=1e-4)
    answer = pipeline("text-classification", str(job.paths.model), device="cpu")
    texts = [{"text": row["text"], **({"text_pair": row["b"]} if pairs else {})} for row in rows]
    cut = {"truncation": "longest_first", "max_length": 16}
    scores = {"single": logits.softmax(-1), "multi_label": logits.sigmoid(), "regression": logits}
    for each, expected in zip(answer(texts, **cut, top_k=None), scores[problem], strict=True):
        by_name = {item["label"]: item["score"] for item in each}
        expected = {names[n]: float(v) for n, v in enumerate(expected)}
        assert by_name == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_batches_of_pairs_match_the_tokenizer(own_rows, make_plan) -> None:
    rows, overrides = own_rows("single", pairs=True)
    plan = make_plan(*overrides, "batch.eval_per_device=30")
    (batch,) = build_data(plan).eval_batches()
    tokenizer = AutoTokenizer.from_pretrained(plan.config.data.tokenizer)
    texts = ([row["text"] for row in rows], [row["b"] for row in rows])
    right = tokenizer(*texts, truncation="longest_first", max_length=16, padding=True,
                      return_tensors="pt")  # fmt: skip
    assert batch.inputs.keys() == right.keys()
    assert {"token_type_ids"} < right.keys()
    for name, tensor in right.items():
        torch.testing.assert_close(batch.inputs[name], tensor)
    assert set(build_data(replace(plan, probe=True)).collate([
        build_data(replace(plan, probe=True)).train[0, 0]
    ]).inputs) >= {"token_type_ids"}  # fmt: skip


@pytest.mark.parametrize("model", ["model=tiny", "model=tiny_t5", "model.type_vocab_size=1"])
def test_model_without_token_types_receives_no_token_types(model, own_rows, make_plan) -> None:
    _, overrides = own_rows("single", pairs=True)
    plan = make_plan(*last_wins(*overrides, model))
    assert "token_type_ids" not in next(iter(build_data(plan).eval_batches())).inputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "words"),
    [("tiny_bert", "task.problem=multi_label task.num_labels=5"),
     ("tiny", "task.problem=regression")],
)  # fmt: skip
def test_memory_is_predicted(words, model, tmp_path, monkeypatch) -> None:
    """Single classes: `test_memory_of_pairs_is_predicted`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    case = Case("", (f"model={model}", "task=sequence_classification", *words.split(),
                     "batch.per_device=4", "data.seq_len=64", "data.num_samples=32",
                     "model.vocab_size=1000", "precision=bf16", *COMMON))  # fmt: skip
    answer = get_or_run_trace(plan_of(case))
    assert answer.traced is not None, answer.reason
    assert step_peak(answer.traced.allocated) == pytest.approx(measured_apart(case), rel=0.01)


@pytest.mark.slow
def test_memory_of_pairs_is_predicted(own_rows, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _, overrides = own_rows("single", pairs=True)
    typed = last_wins(*overrides, "train.steps=3", "train.save_final=false", "hardware=cpu")
    case = Case("", typed)
    answer = get_or_run_trace(plan_of(case))
    assert answer.traced is not None, answer.reason
    assert step_peak(answer.traced.allocated) == pytest.approx(measured_apart(case), rel=0.01)


# --- metrics, by hand -----------------------------------------------------------------------------


def test_multi_label_metrics_match_hand_computed_values() -> None:
    right = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0], [0, 1, 0]], np.float32)
    found = np.array([[1, 0, 1], [0, 0, 1], [1, 0, 0], [0, 1, 0]], bool)
    row, classes = classification_metrics(found, right, ["a", "b", "c"])
    assert row["eval/accuracy"] == 2 / 4
    assert row["eval/f1_micro"] == pytest.approx(2 * 4 / (5 + 5))
    assert classes["f1"] == pytest.approx([1, 2 / 3, 2 / 3])
    assert row["eval/f1_macro"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    assert classes["support"] == [2, 2, 1]
    assert "confusion" not in classes
    json.dumps(classes)
    variant = SimpleNamespace(label="x", records=[SimpleNamespace(classes=classes)])
    section = _classes(SimpleNamespace(variant=variant))
    assert section.head == ("true class", "precision", "recall", "f1")
    assert section.rows[1] == ("b", "1.0000", "0.5000", "0.6667")


@pytest.mark.parametrize(
    ("found", "right", "absent"),
    [
        ([1, 2, 3], [1, 2, 4], ()),
        ([2, 2, 2], [1, 2, 4], ("pearson", "spearman")),
        ([1, 2, 3], [4, 4, 4], ("pearson", "spearman", "r2")),
        ([1], [2], ("pearson", "spearman", "r2")),
        ([1, float("nan")], [1, 2], ("mae", "mse", "pearson", "spearman", "r2")),
        ([1, float("inf")], [1, 2], ("mae", "mse", "pearson", "spearman", "r2")),
    ],
    ids=["all", "one answer", "one label", "one sample", "nan", "inf"],
)
def test_regression_metrics_match_hand_computed_values(found, right, absent) -> None:
    arrays = np.array(found, np.float32), np.array(right, np.float32)
    row, classes = classification_metrics(*arrays, ["LABEL_0"])
    assert classes == {}
    names = {"mae", "mse", "pearson", "spearman", "r2"}
    assert row.keys() == {f"eval/{name}" for name in names - set(absent)}
    if not absent:
        assert row["eval/mae"] == pytest.approx(1 / 3)
        assert row["eval/mse"] == pytest.approx(1 / 3)
        assert row["eval/r2"] == pytest.approx(1 - 1 / (14 / 3))
        assert row["eval/spearman"] == pytest.approx(1)
        assert row["eval/pearson"] == pytest.approx(3 / (2 * 14 / 3) ** 0.5)
