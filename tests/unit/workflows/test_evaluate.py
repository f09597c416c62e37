"""`eke evaluate`: the run's own last evaluation again, other data by hand, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import save_checkpoint
from prepared import write_jsonl
from sklearn.metrics import f1_score
from trained import record_of
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from eke.cli import main
from eke.common.errors import ConfigError, EkeError
from eke.common.paths import RunPaths, user_path
from eke.plan.planner import read_plan
from eke.training.batches.batches import MicroBatch
from eke.training.loop.generation import prompt_and_answer
from eke.workflows.evaluate import evaluate_run, evaluation_plan

# peft 0.21 asks by a name that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)

LONGER = ("data=jsonl", "train.steps=3", "train.eval_every=1")
BERT = ("task=sequence_classification", "task.num_labels=3", "model.name_or_path=bert")
KINDS = {
    "classes": (*BERT, "train.keep_best=f1_macro"),
    "lora": ("peft=lora", "model.name_or_path=llama", "precision=bf16", "batch.per_device=4"),
    "seq2seq": ("task=seq2seq_lm", "model.name_or_path=t5", "data.prompt=text",
                "data.response=label"),
    "prompts": ("model.name_or_path=llama", "data.prompt=text", "data.response=label"),
    "checkpointing": ("model.name_or_path=llama", "memory=checkpointing", "optimizer=adafactor",
                      "kernels=fused_linear_cross_entropy"),
}  # fmt: skip
LABELS = ("yes", "no", "maybe")


@pytest.fixture(scope="module")
def trained(run_folder, train_kind):
    """Kind -> the record of a finished run with an id of the same name."""
    for family in ("bert", "llama", "t5"):
        save_checkpoint(run_folder / family, family, tokenizer=True)
    rows = [{"text": f"fox {n} dog", "label": LABELS[n % 3]} for n in range(60)]
    write_jsonl(run_folder / "rows.jsonl", rows)
    # Two classes of three: by themselves they would have other numbers.
    other = [{"text": f"dog {n}", "label": LABELS[n % 2]} for n in range(21)]
    write_jsonl(run_folder / "other.jsonl", other)
    write_jsonl(run_folder / "one.jsonl", other[::2])
    write_jsonl(run_folder / "new.jsonl", [*other, {"text": "a fox", "label": "never"}])
    return lambda kind: record_of(train_kind(kind, *LONGER, *KINDS[kind]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_reproduces_the_recorded_metrics(kind, trained) -> None:
    record = trained(kind)
    found = evaluate_run(kind, [])
    assert found.step == record.model_step
    assert found.metrics["loss"] == pytest.approx(record.loss.eval_final, rel=1e-5)
    for name, value in record.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-5)
    assert found.classes == record.classes
    if kind in ("classes", "prompts"):
        smaller = evaluate_run(kind, ["batch.eval_per_device=3"])
        assert smaller.metrics == pytest.approx(found.metrics, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "count"), [("other.jsonl", 21), ("one.jsonl", 11)])
def test_other_data_matches_hand_computed_metrics(file, count, trained, capsys) -> None:
    record = trained("classes")
    folder = f"runs/classes/checkpoints/step-{record.model_step:08d}/model"
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    right = [model.config.label2id[row["label"]] for row in rows]
    with torch.no_grad():
        logits = [model(**tokenizer(row["text"], return_tensors="pt")).logits[0] for row in rows]
    loss = torch.nn.functional.cross_entropy(torch.stack(logits), torch.tensor(right)).item()
    predicted = [int(each.argmax()) for each in logits]
    assert main(["evaluate", "classes", f"data.path={file}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_samples"] == count == len(rows)
    assert found["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)
    hits = sum(a == b for a, b in zip(predicted, right, strict=True))
    assert found["metrics"]["accuracy"] == pytest.approx(hits / count)
    expected = f1_score(right, predicted, average="macro", zero_division=0)
    assert found["metrics"]["f1_macro"] == pytest.approx(expected)
    assert found["classes"]["names"] == list(model.config.id2label.values())
    assert found["classes"]["support"] == [right.count(n) for n in range(3)]
    if count == 21:
        assert main(["evaluate", "classes", f"data.path={file}"]) == 0
        assert f"{count} samples" in capsys.readouterr().out


@pytest.mark.slow
def test_other_data_option_is_evaluated_completely(trained, tmp_path) -> None:
    trained("checkpointing")
    (tmp_path / "a.txt").write_text("fox dog " * 2000)
    typed = ["data=text", f"data.path={tmp_path / 'a.txt'}"]
    found = evaluate_run("checkpointing", typed)
    assert found.num_samples > 20
    fewer = evaluate_run("checkpointing", [*typed, "data.num_eval_samples=5"])
    assert fewer.num_samples == 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prompts", "seq2seq"])
def test_generated_answers_match_hand_computed_metrics(kind, trained) -> None:
    """Against plain transformers, prompt by prompt, and ROUGE-L by the definition."""
    record = trained(kind)
    folder = f"runs/{kind}/checkpoints/step-{record.model_step:08d}/model"
    seq2seq = kind == "seq2seq"
    head = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
    model, tokenizer = head.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    pairs = []
    for row in map(json.loads, Path("other.jsonl").read_text().splitlines()):
        text = row["text"] if seq2seq else row["text"] + "\n"
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        if not seq2seq and ids[0, -1] == tokenizer.eos_token_id:
            ids = ids[:, :-1]
        written = model.generate(ids, max_new_tokens=6, do_sample=False)[0]
        written = written[0 if seq2seq else ids.shape[1] :]
        pairs.append((tokenizer.decode(written, skip_special_tokens=True), row["label"]))
    typed = ["data.path=other.jsonl", "evaluate.generate=true", "evaluate.max_new_tokens=6"]
    found = evaluate_run(kind, typed).metrics
    assert found["exact_match"] == sum(a.strip() == b for a, b in pairs) / 21
    scores = [rouge_l(a.lower().split(), b.split()) for a, b in pairs]
    assert found["rouge_l"] == pytest.approx(sum(scores) / 21, abs=1e-6)
    more = evaluate_run(kind, [*typed, "batch.eval_per_device=1"]).metrics
    assert more == pytest.approx(found, rel=1e-5)


def rouge_l(found: list[str], right: list[str]) -> float:
    """F-measure of the longest common subsequence."""
    table = [[0] * (len(right) + 1) for _ in range(len(found) + 1)]
    for i, one in enumerate(found):
        for j, other in enumerate(right):
            table[i + 1][j + 1] = (
                table[i][j] + 1 if one == other else max(table[i][j + 1], table[i + 1][j])
            )
    common = table[-1][-1]
    return 2 * common / (len(found) + len(right)) if common else 0.0


@pytest.mark.parametrize(
    ("labels", "prompt", "answer"),
    [
        ([-100, -100, 4, 5, -100], [1, 2, 3], [4, 5]),
        ([2, -100, 4, -100, 6], [1, 2, 3, 4, 5], [6]),
        ([2, 3, 4, 5, 6], [1], [2, 3, 4, 5, 6]),
    ],
)
def test_last_answer_of_a_conversation_is_regenerated(labels, prompt, answer) -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    batch = MicroBatch({"input_ids": ids}, torch.tensor([labels]), 1, 2, 5)
    found = prompt_and_answer(batch, 0)
    assert [each.tolist() for each in found] == [prompt, answer]


@pytest.mark.slow
def test_answer_is_not_limited_by_the_position_table(trained) -> None:
    trained("prompts")
    found = evaluate_run("prompts", ["evaluate.generate=true", "evaluate.max_new_tokens=100000",
                                 "data.num_eval_samples=1"])  # fmt: skip
    assert 0 <= found.metrics["rouge_l"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["evaluate.generate=yes"], "must be true or false"),
        (["evaluate.generate=true", "evaluate.max_new_tokens=0"], "must be a positive integer"),
        (["evaluate.generate=true"], "requires data with prompts and answers"),
        (["data.path=new.jsonl"], "classes that the model was not trained on: never"),
        (["data.path=absent.jsonl"], "no such file"),
        (["optimizer.lr=1"], "optimizer.lr = 1"),
        (["model=tiny"], "would change the model"),
        (["batch.per_device=2"], "has no effect on an evaluation"),
        (["data.label=text", "data.path=other.jsonl"], "21 different labels"),
    ],
)
def test_invalid_evaluation_is_rejected_with_a_fix(typed, message, trained) -> None:
    trained("classes")
    with pytest.raises(ConfigError) as raised:
        evaluate_run("classes", typed)
    assert message in str(raised.value)
    assert "->" in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "fix"), [(4, "batch.eval_per_device=2"), (1, "hardware=cpu")])
def test_too_little_memory_is_one_message(size, fix, trained, monkeypatch) -> None:
    trained("classes")

    def fail(*_: object, even: bool) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("eke.training.loop.evaluation.measure", fail)
    with pytest.raises(EkeError, match=f"{size} sample.*\n  -> {fix}"):
        evaluate_run("classes", [f"batch.eval_per_device={size}"])


@pytest.mark.slow
def test_training_settings_are_ignored(trained) -> None:
    """A run with everything of a cluster is evaluated on a laptop."""
    trained("lora")
    plan = read_plan(RunPaths(user_path("runs/lora")))
    typed = (*plan.overrides, "distributed=zero3", "offload=cpu", "optimizer=adamw_8bit")
    found = evaluation_plan(replace(plan, overrides=typed), [])
    assert found.config.distributed.option == "none"
    assert found.config.peft.option == "lora"
    assert found.config.precision.option == "bf16"
