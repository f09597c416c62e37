"""A saved classifier says which class is which, in the words of the data."""

from itertools import pairwise

import datasets
import pytest
import torch
import transformers
from checkpoints import save_checkpoint
from prepared import write_jsonl
from support import last_wins

from eke.common.errors import ConfigError
from eke.config.compose import compose
from eke.data.sources import open_store, request_of
from eke.training.model.save_model import build_trainable, save_pretrained, set_id2label
from eke.workflows.evaluate import _classes
from eke.workflows.planning import plan_for

pytestmark = pytest.mark.usefixtures("own_cache")
SHORT = ("task=sequence_classification", "data.seq_len=16", "batch.per_device=4", "hardware=cpu",
         "tracker=none")  # fmt: skip


def rows_of(folder, *labels):
    rows = [{"text": f"row {n}", "label": labels[n % len(labels)]} for n in range(60)]
    return "data=jsonl", f"data.path={write_jsonl(folder / 'a.jsonl', rows)}"


def classes(folder, *typed):
    """The classes of the saved model, and what a run is told of them."""
    plan = plan_for(compose(last_wins(*SHORT, *typed)), planning=True)
    model, report = build_trainable(plan, torch.device("cpu"))
    told = set_id2label(plan, model, report)
    save_pretrained(model, folder / "saved")
    saved = transformers.AutoConfig.from_pretrained(folder / "saved")
    assert {name: number for number, name in saved.id2label.items()} == saved.label2id
    assert len(saved.id2label) == saved.num_labels == plan.config.task.num_labels
    return saved.id2label, told


def pretrained(folder):
    return "model=pretrained", f"model.name_or_path={folder}", "data.tokenizer=bytes"


def test_class_names_come_from_rows_with_transformers_defaults(tmp_path) -> None:
    rows = rows_of(tmp_path, "spam", "ham")
    found, told = classes(tmp_path, *rows, "model=tiny", "task.num_labels=3")
    assert found == {0: "ham", 1: "spam", 2: "LABEL_2"}
    assert told == []


def test_default_class_names_keep_their_numbers(tmp_path) -> None:
    """In sorted order LABEL_10 would come before LABEL_2."""
    labels = [f"LABEL_{number}" for number in (10, 2, 7)]
    rows = rows_of(tmp_path, *labels)
    typed = (*rows, "model=tiny", "task.num_labels=11")
    found, _ = classes(tmp_path, *typed)
    assert found == {number: f"LABEL_{number}" for number in range(11)}
    store = open_store(request_of(compose(last_wins(*SHORT, *typed)).config))
    assert set(store.array("labels").tolist()) == {10, 2, 7}


def test_class_names_are_text_folders(tmp_path) -> None:
    for folder, size in (("art", 9), ("science", 20)):
        (tmp_path / "texts" / folder).mkdir(parents=True)
        for n in range(20):
            (tmp_path / "texts" / folder / f"{n}.txt").write_text(f"some text {n} " * size)
    typed = ("data=text", f"data.path={tmp_path / 'texts'}", "data.eval_frac=0.3", "model=tiny")
    found, _ = classes(tmp_path, *typed)
    assert found == {0: "science", 1: "art"}


NAMES = ("negative", "positive", "neutral")
"""Of the head of `three`, by number; sorted they stand in another order."""


@pytest.fixture
def three(tmp_path):
    """A classifier of three classes."""
    return save_checkpoint(
        tmp_path / "three", "bert", task="sequence_classification",
        id2label=dict(enumerate(NAMES)), label2id={name: n for n, name in enumerate(NAMES)},
    )  # fmt: skip


def built(*typed):
    """The plan, its model, and what a run is told of weights and classes."""
    plan = plan_for(compose(last_wins(*SHORT, *typed)), planning=True)
    model, report = build_trainable(plan, torch.device("cpu"))
    return plan, model, [*report.warnings, *set_id2label(plan, model, report)]


def logits_of(model):
    """Of three rows, without dropout."""
    ids = torch.arange(9, 24).reshape(3, 5)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def labels_of(plan):
    """Text of each row that is trained or evaluated -> its number."""
    request = request_of(plan.config)
    store = open_store(request)
    tokens, offsets = store.array("tokens"), store.array("offsets")
    rows = [bytes(t - 8 for t in tokens[a:b].tolist() if t >= 8) for a, b in pairwise(offsets)]
    return {row.decode(): int(n) for row, n in zip(rows, store.array("labels"), strict=True)}


@pytest.mark.parametrize(
    ("names", "typed"),
    [
        (NAMES, ()),
        (NAMES[::-1], ("task.num_labels=3",)),
        (NAMES[:2], ("task.num_labels=3",)),
        (("neutral", "negative"), ()),
    ],
    ids=" ".join,
)
def test_matching_names_keep_checkpoint_numbers_and_head(names, typed, tmp_path, three) -> None:
    plan, model, told = built(*rows_of(tmp_path, *names), *pretrained(three), *typed)
    assert plan.config.task.num_labels == 3
    right = {f"row {n}": NAMES.index(names[n % len(names)]) for n in range(60)}
    assert labels_of(plan) == right
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(three)
    assert torch.allclose(logits_of(model), logits_of(plain), atol=1e-6)
    assert model.config.id2label == dict(enumerate(NAMES))
    assert told == []


def test_different_class_count_creates_a_new_head(tmp_path, three) -> None:
    names = ("positive", "neutral")
    typed = (*rows_of(tmp_path, *names), *pretrained(three), "task.num_labels=2")
    plan, model, told = built(*typed)
    assert labels_of(plan)["row 0"] == 1, "sorted: neutral, positive"
    assert model.config.id2label == {0: "neutral", 1: "positive"}
    assert model.classifier.weight.shape == (2, 32)
    assert any("initialized at random" in warning for warning in told)
    assert not any("the classes" in warning for warning in told)


@pytest.mark.parametrize("names", [("spam", "ham", "positive"), ("ham", "spam")], ids=" ".join)
def test_unknown_class_names_are_rejected(names, tmp_path, three) -> None:
    typed = (*rows_of(tmp_path, *names), *pretrained(three))
    with pytest.raises(
        ConfigError, match=r"has the classes ham,.*negative, positive, neutral"
    ) as e:
        built(*typed)
    _, model, told = built(*typed, *e.value.problems[0].fix.words)
    assert list(model.config.id2label.values()) == sorted(names)
    assert (bool(told) and "0=ham" in told[-1]) or len(names) == 2, "of two classes: a new head"


def test_configured_names_are_matched_by_name(tmp_path, three) -> None:
    """The rows' 0 is the second of the head's classes, whatever the case."""
    typed = "task.labels=[Positive,neutral]"
    plan, model, told = built(*rows_of(tmp_path, 0, 1), *pretrained(three), typed)
    assert [labels_of(plan)[f"row {n}"] for n in range(2)] == [1, 2]
    assert model.config.id2label == dict(enumerate(NAMES))
    assert told == []


OTHER = ("neutral", "negative", "positive")


def named_rows(folder, option="parquet"):
    """Rows whose ClassLabel numbers the names of `three` otherwise."""
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(3, OTHER))
    rows = [{"text": f"row {n}", "label": n % 3} for n in range(60)]
    (folder / "rows").mkdir()
    datasets.Dataset.from_list(rows, features=features).to_parquet(folder / "rows/a.parquet")
    return f"data={option}", f"data.{'name' if option == 'hub' else 'path'}={folder / 'rows'}"


@pytest.mark.parametrize("option", ["parquet", "hub"])
def test_data_names_are_matched_by_name(option, tmp_path, three) -> None:
    typed = named_rows(tmp_path, option)
    plan, model, told = built(*typed, *pretrained(three))
    assert [labels_of(plan)[f"row {n}"] for n in range(3)] == [2, 0, 1]
    assert model.config.id2label == dict(enumerate(NAMES))
    assert told == []
    found, _ = classes(tmp_path, *typed, "model=tiny", "task.num_labels=3")
    assert tuple(found.values()) == OTHER


def test_evaluation_with_ambiguous_class_numbers_is_rejected(tmp_path, three) -> None:
    trained, *_ = built(*named_rows(tmp_path), *pretrained(three))
    numbers = (*rows_of(tmp_path, 0, 1, 2), *pretrained(three))
    with pytest.raises(ConfigError) as caught:
        _classes(built(*numbers)[0], list(NAMES), trained)
    assert caught.value.problems[0].fix.words[0].startswith("task.labels=")
    plan, *_ = built(*numbers, f"task.labels=[{','.join(OTHER)}]")
    assert _classes(plan, list(NAMES), trained)[1].tolist() == [0, 1, 2]
    assert [labels_of(plan)[f"row {n}"] for n in range(3)] == [2, 0, 1]
    _, plain = _classes(built(*numbers)[0], list(NAMES), built(*numbers)[0])
    assert plain is None, "the model's own numbers"


def test_configured_names_are_saved_in_the_model(tmp_path) -> None:
    typed = "task.labels=[low,mid,high]"
    found, _ = classes(tmp_path, *rows_of(tmp_path, 0, 1, 2), "model=tiny", typed)
    assert found == {0: "low", 1: "mid", 2: "high"}, "and as many classes"


def test_default_transformers_names_are_ignored(tmp_path) -> None:
    folder = save_checkpoint(tmp_path / "m", "bert", task="sequence_classification", num_labels=3)
    plan, model, told = built(*rows_of(tmp_path, "b", "c", "a"), *pretrained(folder))
    assert plan.config.task.num_labels == 3
    assert [labels_of(plan)[f"row {n}"] for n in range(3)] == [1, 2, 0]
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert told == []


def test_integer_labels_are_checkpoint_ids(tmp_path, three) -> None:
    plan, model, told = built(*rows_of(tmp_path, 2, 0), *pretrained(three))
    assert [labels_of(plan)[f"row {n}"] for n in range(2)] == [2, 0]
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(three)
    assert torch.allclose(logits_of(model), logits_of(plain), atol=1e-6)
    assert model.config.id2label == dict(enumerate(NAMES))
    assert told == []


def test_checkpoint_without_head_gets_the_classes_of_the_task(tmp_path) -> None:
    folder = save_checkpoint(tmp_path / "m", "bert")
    plan, model, told = built(*rows_of(tmp_path, "b", "a"), *pretrained(folder))
    assert plan.config.task.num_labels == model.config.num_labels == 2
    assert [labels_of(plan)[f"row {n}"] for n in range(2)] == [1, 0]
    assert any("missing from the checkpoint" in warning for warning in told)
