"""Labels of rows: several classes, numbers, and what is neither."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from prepared import store_of, write_jsonl
from unit.plan.cases import plan_of

from eke.cli.data_show import _label
from eke.common.errors import ConfigError
from eke.training.batches.dataset import build_data
from eke.training.batches.sampler import StoredRows

CLASSIFY = ("model=tiny_bert", "task=sequence_classification", "data=jsonl")
SEVERAL = (*CLASSIFY, "task.problem=multi_label")
NUMBERS = (*CLASSIFY, "task.problem=regression")


def labelled(tmp_path, labels: list, name: str = "a.jsonl") -> str:
    rows = [{"text": f"row {n}", "label": labels[n % len(labels)]} for n in range(60)]
    return f"data.path={write_jsonl(tmp_path / name, rows)}"


def classes_of(store) -> dict[str, list[str]]:
    """Text of each row -> its classes."""
    names, found = store.manifest.label_names, {}
    for split in ("train", "evaluation"):
        rows = StoredRows(store, split, None)
        for index in range(len(rows)):
            text = bytes(int(t) - 8 for t in rows.row(index).tokens if t >= 8).decode()
            found[text] = sorted(names[n] if names else int(n) for n in rows.label(index))
    return found


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("jsonl", "names"),
        ("jsonl", "numbers"),
        ("csv, commas", "numbers"),
        ("csv, semicolons", "names"),
        ("csv, JSON", "numbers"),
        ("parquet", "names"),
    ],
)
def test_lists_of_classes_are_read_from_every_format(option, kind, tmp_path) -> None:
    lists = [["zoo", "art"], [], ["art"], ["zoo"]] if kind == "names" else [[1, 0], [], [0], [1]]
    option, _, how = option.partition(", ")
    path = tmp_path / f"a.{option}"
    rows = [{"text": f"row {n}", "label": lists[n % 4]} for n in range(60)]
    if option == "jsonl":
        write_jsonl(path, rows)
    elif option == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        text = {"commas": ", ".join, "semicolons": ";".join, "JSON": None}[how]
        joined = [text(map(str, r["label"])) if text else json.dumps(r["label"]) for r in rows]
        quoted = ['"' + label.replace('"', '""') + '"' for label in joined]
        lines = [f"{row['text']},{label}\n" for row, label in zip(rows, quoted, strict=True)]
        path.write_text("text,label\n" + "".join(lines))
    store = store_of(*SEVERAL, f"data={option}", f"data.path={path}")
    assert (store.manifest.num_bad, store.manifest.counts["label_offsets"]) == (0, 61)
    assert classes_of(store) == {row["text"]: sorted(row["label"]) for row in rows}
    assert store.manifest.label_names == (("art", "zoo") if kind == "names" else ())


def test_labels_of_batches(tmp_path) -> None:
    path = labelled(tmp_path, [["zoo", "art"], [], ["art"]])
    samples = build_data(plan_of(*SEVERAL, path)).train
    labels = [samples[0, n]["labels"] for n in range(len(samples))]
    assert {label.dtype for label in labels} == {np.dtype(np.float32)}
    assert {tuple(label.tolist()) for label in labels} == {(1, 1), (0, 0), (1, 0)}
    assert build_data(plan_of(*SEVERAL, path)).collate([samples[0, 0]] * 3).num_targets == 6
    path = labelled(tmp_path, [0.5, -2, 1e30, 0], "b.jsonl")
    samples = build_data(plan_of(*NUMBERS, path)).train
    labels = [samples[0, n]["labels"] for n in range(len(samples))]
    assert {label.dtype for label in labels} == {np.dtype(np.float32)}
    assert {float(label) for label in labels} == {0.5, -2, float(np.float32(1e30)), 0}


def test_numbers_in_csv(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f"row {n},{n / 8}\n" for n in range(40)))
    store = store_of(*NUMBERS, "data=csv", f"data.path={path}")
    assert store.array("values").tolist() == [n / 8 for n in range(40)]


@pytest.mark.parametrize(
    ("base", "labels", "words", "fix"),
    [
        (NUMBERS, ["good", "bad"], "label is the text good, not a number", "task.problem=single"),
        (NUMBERS, [["a"], ["b"]], "label is a list, not a number", "task.problem=multi_label"),
        (NUMBERS, [1, 2, float("nan")], "label is nan, not a finite number", "data.max_bad_frac="),
        (NUMBERS, [1, 2, 1e300], "label is 1e+300, not a finite number", "data.max_bad_frac="),
        (NUMBERS, [1, 2, 10**400], "not a finite number", "data.max_bad_frac="),
        (NUMBERS, [1, 2, None], "label is null, not a number", "data.max_bad_frac="),
        (NUMBERS, [1, 2, True], "label is true, not a number", "data.max_bad_frac="),
        (NUMBERS, [2.5], "all with the label: 2.5", "data.label=COLUMN"),
        (SEVERAL, ["a", "b"], "label is the text a, not a list of classes", "task.problem=single"),
        (SEVERAL, [0, 1], "label is the number 0, not a list", "task.problem=single"),
        (SEVERAL, [[0], [1], None], "label is null, not a list", "data.max_bad_frac="),
        (SEVERAL, [[0], [1], ["a"]], "label is a, where rows before", "data.max_bad_frac="),
        (SEVERAL, [[0], [1], [0.5]], "label is the number 0.5, neither", "data.max_bad_frac="),
        (SEVERAL, [[0], [1], [4]], "label is 4, outside 0 to 1", "task.num_labels=5"),
        (SEVERAL, [[0, 1], [0, 0]], "has a class twice: [0, 0]", "data.max_bad_frac="),
        (SEVERAL, [["a"], ["b", "c"]], "3 different labels: a, b, c", "task.num_labels=3"),
        (SEVERAL, [[]], "all with the label: none", "data.label=COLUMN"),
        (CLASSIFY, [0.25, 0.5], "label is the number 0.25", "task.problem=regression"),
        (CLASSIFY, [["a"], ["b"]], "label is a list, neither", "task.problem=multi_label"),
        (CLASSIFY, [0, 1, 0.5, 0.7, 9], "label is the number 0.5", "data.max_bad_frac="),
        (CLASSIFY, [0, 1, 4], "label is 4, outside 0 to 1", "task.num_labels=5"),
        (CLASSIFY, ["a", "b", "c"], "has 3 different labels: a, b, c", "task.num_labels=3"),
        (CLASSIFY, [0, 1, "a"], "a, where rows before it had a number", "data.max_bad_frac="),
        (CLASSIFY, [0, 1, None], "null, neither a whole number nor a text", "data.max_bad_frac="),
        (CLASSIFY, [0, -1, 1], "label is -1, outside 0 to 1", "data.max_bad_frac="),
    ],
    ids=range(25),
)
def test_wrong_labels_have_one_message(base, labels, words, fix, tmp_path, own_cache) -> None:
    path = labelled(tmp_path, labels)
    with pytest.raises(ConfigError) as caught:
        plan_of(*base, path)
    (problem,) = caught.value.problems
    assert words in problem.why
    assert str(problem.fix).startswith(fix)
    if "COLUMN" not in fix:
        plan_of(*{o.split("=")[0]: o for o in (*base, path, str(problem.fix))}.values())


def test_text_of_a_csv_that_is_no_number(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "a,nan\nb,good\n" * 9)
    with pytest.raises(ConfigError, match=r"label is nan, not a finite.*the text good"):
        store_of(*NUMBERS, "data=csv", f"data.path={path}")


@pytest.mark.parametrize("labels", [[["zoo", "art"], []], [0.5, 1], ["b", "a"], [1, 0]])
def test_a_row_is_shown_with_its_label(labels, tmp_path) -> None:
    base = {list: SEVERAL, float: NUMBERS}.get(type(labels[0]), CLASSIFY)
    store = store_of(*base, labelled(tmp_path, labels))
    shown = {", class art, zoo", ", class none", ", label 0.5", ", label 1", ", class a",
             ", class b", ", class 1", ", class 0"}  # fmt: skip
    assert {_label(store, 0), _label(store, 1)} < shown
    assert _label(store_of("data=jsonl", labelled(tmp_path, labels)), 0) == ""
