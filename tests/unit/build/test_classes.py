"""A saved classifier says which class is which, in the words of the data."""

import pytest
import torch
import transformers
from checkpoints import save_checkpoint
from prepared import write_jsonl
from support import last_wins

from eke.app import plan_for
from eke.build.classes import name_classes
from eke.build.export import save_pretrained
from eke.build.trainable import build_trainable
from eke.compose import compose

SHORT = ("task=sequence_classification", "data.seq_len=16", "batch.per_device=4", "hardware=cpu",
         "tracker=none")  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rows_of(folder, *labels):
    rows = [{"text": f"row {n}", "label": labels[n % len(labels)]} for n in range(60)]
    return "data=jsonl", f"data.path={write_jsonl(folder / 'a.jsonl', rows)}"


def classes(folder, *typed):
    """The classes of the saved model, and what a run is told of them."""
    plan = plan_for(compose(last_wins(*SHORT, *typed)), planning=True)
    model, report = build_trainable(plan, torch.device("cpu"))
    told = name_classes(plan, model, report)
    save_pretrained(model, folder / "saved")
    saved = transformers.AutoConfig.from_pretrained(folder / "saved")
    assert {name: number for number, name in saved.id2label.items()} == saved.label2id
    assert len(saved.id2label) == saved.num_labels == plan.config.task.num_labels
    return saved.id2label, told


@pytest.fixture
def checkpoint(tmp_path):
    """A classifier that was trained on classes of its own."""
    return save_checkpoint(
        tmp_path / "mine", "bert", task="sequence_classification",
        id2label={0: "good", 1: "bad"}, label2id={"good": 0, "bad": 1},
    )  # fmt: skip


def pretrained(folder):
    return "model=pretrained", f"model.name_or_path={folder}", "data.tokenizer=bytes"


def test_names_are_those_of_the_rows(tmp_path) -> None:
    found, told = classes(tmp_path, *rows_of(tmp_path, "spam", "ham"), "model=tiny")
    assert found == {0: "ham", 1: "spam"}
    assert told == []


def test_a_class_without_rows_has_transformers_name(tmp_path) -> None:
    rows = rows_of(tmp_path, "spam", "ham")
    found, _ = classes(tmp_path, *rows, "model=tiny", "task.num_labels=3")
    assert found == {0: "ham", 1: "spam", 2: "LABEL_2"}


def test_names_are_the_folders_of_a_text(tmp_path) -> None:
    for folder, size in (("art", 9), ("science", 20)):
        (tmp_path / "texts" / folder).mkdir(parents=True)
        for n in range(20):
            (tmp_path / "texts" / folder / f"{n}.txt").write_text(f"some text {n} " * size)
    typed = ("data=text", f"data.path={tmp_path / 'texts'}", "data.eval_frac=0.3", "model=tiny")
    found, _ = classes(tmp_path, *typed)
    assert found == {0: "science", 1: "art"}


def test_other_classes_than_the_checkpoints_head_are_saved_and_said(tmp_path, checkpoint) -> None:
    rows = rows_of(tmp_path, "good", "bad")
    found, told = classes(tmp_path, *rows, *pretrained(checkpoint))
    assert found == {0: "bad", 1: "good"}
    assert told == [
        "the checkpoint's head was trained on the classes 0=good 1=bad, and goes on with "
        "0=bad 1=good"
    ]


def test_the_same_classes_are_not_worth_a_word(tmp_path) -> None:
    names = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    folder = save_checkpoint(tmp_path / "m", "bert", task="sequence_classification", **names)
    _, told = classes(tmp_path, *rows_of(tmp_path, "good", "bad"), *pretrained(folder))
    assert told == []


def test_numbered_rows_keep_the_checkpoints_names(tmp_path, checkpoint) -> None:
    found, told = classes(tmp_path, *rows_of(tmp_path, 0, 1), *pretrained(checkpoint))
    assert found == {0: "good", 1: "bad"}
    assert told == []
