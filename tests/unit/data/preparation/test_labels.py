"""Labels of rows: several classes, numbers, and what is neither."""

import csv
import json

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from prepared import store_of, write_jsonl
from support import last_wins
from unit.plan.cases import plan_of

from eke.cli.data_show import _label
from eke.common.errors import ConfigError
from eke.training.batches.dataset import build_data
from eke.training.batches.sampler import StoredRows
from eke.training.batches.tasks import class_names

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
def test_class_lists_are_read_from_every_format(option, kind, tmp_path) -> None:
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


def test_labels_are_batched(tmp_path) -> None:
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


def test_csv_numbers_are_read(tmp_path) -> None:
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
        (NUMBERS, [2.5], "have the label 2.5", "data.label=COLUMN"),
        (SEVERAL, ["a", "b"], "label is the text a, not a list of classes", "task.problem=single"),
        (SEVERAL, [0, 1], "label is the number 0, not a list", "task.problem=single"),
        (SEVERAL, [[0], [1], None], "label is null, not a list", "data.max_bad_frac="),
        (SEVERAL, [[0], [1], ["a"]], "label is a, earlier rows have a num", "data.max_bad_frac="),
        (SEVERAL, [[0], [1], [0.5]], "label is the number 0.5, neither", "data.max_bad_frac="),
        (SEVERAL, [[0], [1], [4]], "label is 4, outside 0 to 1", "task.num_labels=5"),
        (SEVERAL, [[0, 1], [0, 0], [1]], "has a class twice: [0, 0]", "data.max_bad_frac="),
        (SEVERAL, [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], "not 2 zeros and ones", "task.num_labels=3"),
        (SEVERAL, [[1, 0, 0, 1], [0, 1, 1, 0]], "not 2 zeros and ones", "task.num_labels=4"),
        (SEVERAL, [[1.0], [0.0], [0.0, 1.0]], "is [1.0], not 2 zeros", "data.max_bad_frac="),
        (SEVERAL, [[0.5, 0.5], [0.0, 1.0]], "is [0.5, 0.5], not 2 zeros", "data.max_bad_frac="),
        (SEVERAL, [[1, 0], [0, 1]], "only the lists [0, 1] and [1, 0]", "data.multi_hot=true"),
        (SEVERAL, [["1", "0"], ["0", "1"]], "only the lists [0, 1] and [1", "data.multi_hot=true"),
        (CLASSIFY, [0, 1, True], "is True, earlier rows have a number", "data.max_bad_frac="),
        (SEVERAL, [["a"], ["b", "c"]], "3 different labels: a, b, c", "task.num_labels=3"),
        (SEVERAL, [[]], "have the label none", "data.label=COLUMN"),
        (CLASSIFY, [0.25, 0.5], "label is the number 0.25", "task.problem=regression"),
        (CLASSIFY, [["a"], ["b"]], "label is a list, neither", "task.problem=multi_label"),
        (CLASSIFY, [0, 1, 0.5, 0.7, 9], "label is the number 0.5", "data.max_bad_frac="),
        (CLASSIFY, [0, 1, 4], "label is 4, outside 0 to 1", "task.num_labels=5"),
        (CLASSIFY, ["a", "b", "c"], "has 3 different labels: a, b, c", "task.num_labels=3"),
        (CLASSIFY, [0, 1, "a"], "a, earlier rows have a number", "data.max_bad_frac="),
        (CLASSIFY, [0, 1, None], "null, neither a whole number nor a text", "data.max_bad_frac="),
        (CLASSIFY, [0, -1, 1], "label is -1, outside 0 to 1", "data.max_bad_frac="),
    ],
    ids=range(32),
)
def test_wrong_labels_have_one_message(base, labels, words, fix, tmp_path, own_cache) -> None:
    path = labelled(tmp_path, labels)
    with pytest.raises(ConfigError) as caught:
        plan_of(*base, path)
    (problem,) = caught.value.problems
    assert words in problem.why
    assert str(problem.fix).startswith(fix)
    if "COLUMN" not in fix:
        plan_of(*{o.split("=")[0]: o for o in (*base, path, *problem.fix.words)}.values())


def test_non_numeric_csv_label_is_rejected(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "a,nan\nb,good\n" * 9)
    with pytest.raises(ConfigError, match=r"nan, .*the text good"):
        store_of(*NUMBERS, "data=csv", f"data.path={path}")


@pytest.mark.parametrize("labels", [[["zoo", "art"], []], [0.5, 1], ["b", "a"], [1, 0]])
def test_row_is_shown_with_its_label(labels, tmp_path) -> None:
    base = {list: SEVERAL, float: NUMBERS}.get(type(labels[0]), CLASSIFY)
    store = store_of(*base, labelled(tmp_path, labels))
    shown = {", class art, zoo", ", class none", ", label 0.5", ", label 1", ", class a",
             ", class b", ", class 1", ", class 0"}  # fmt: skip
    assert {_label(store, 0), _label(store, 1)} < shown
    assert _label(store_of("data=jsonl", labelled(tmp_path, labels)), 0) == ""


def stored(*overrides: str):
    return store_of(*last_wins(*overrides))


def planned(*overrides: str):
    return plan_of(*last_wins(*overrides))


VECTORS = [[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]]


def written(tmp_path, option: str, labels: list, features=None, name: str = "a") -> tuple[str, ...]:
    """Sixty rows in a file or a data set in the hub's layout, and the overrides that read it."""
    rows = [{"text": f"row {n}", "label": labels[n % len(labels)]} for n in range(60)]
    folder = tmp_path / name
    folder.mkdir()
    if option == "jsonl":
        write_jsonl(folder / "a.jsonl", rows)
    elif option == "csv":
        texts = [[row["text"], row["label"]] for row in rows]
        with open(folder / "a.csv", "w", newline="") as file:
            csv.writer(file).writerows([["text", "label"], *texts])
    elif features is None:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    else:
        features = datasets.Features(text=datasets.Value("string"), label=features)
        datasets.Dataset.from_list(rows, features=features).to_parquet(folder / "a.parquet")
    return f"data={option}", f"data.{'name' if option == 'hub' else 'path'}={folder}"


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("jsonl", float), ("jsonl", int), ("jsonl", bool), ("jsonl", str), ("csv", float),
        ("csv", int), ("csv", bool), ("parquet", float), ("parquet", int), ("parquet", bool),
        ("hub", float), ("hub", int),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
@pytest.mark.parametrize("size", [2, 3])
def test_multi_hot_lists_are_read_from_every_format(option, kind, size, tmp_path) -> None:
    vectors = [vector[:size] for vector in VECTORS]
    typed = [[kind(n) for n in vector] for vector in vectors]
    labels = [json.dumps(vector) for vector in typed] if option == "csv" else typed
    more = (*SEVERAL, f"task.num_labels={size}", *written(tmp_path, option, labels))
    store = stored(*more)
    assert store.manifest.num_bad == 0
    right = {f"row {n}": np.flatnonzero(vectors[n % 4]).tolist() for n in range(60)}
    assert classes_of(store) == right


def test_saved_dataset_is_read_like_a_hub_dataset(tmp_path) -> None:
    features = datasets.ClassLabel(names=["no", "yes"])
    (_, typed) = written(tmp_path, "hub", [0, 1], features)
    datasets.Dataset.from_parquet(f"{typed.partition('=')[2]}/a.parquet").save_to_disk(
        saved := tmp_path / "saved"
    )
    for name in (typed, f"data.name={saved}"):
        store = stored(*CLASSIFY, "data=hub", name)
        assert (store.manifest.num_rows, store.manifest.label_names) == (60, ("no", "yes"))


@pytest.mark.parametrize(("separator", "one"), [(",", "1"), (";", "1.0"), (" ", "1")])
def test_multi_hot_csv_texts_are_read(separator, one, tmp_path) -> None:
    labels = [separator.join((one, one.replace("1", "0"), one)), f"{one}{separator}1{separator}0"]
    store = stored(*SEVERAL, "task.num_labels=3", *written(tmp_path, "csv", labels))
    assert [classes_of(store)[f"row {n}"] for n in range(2)] == [[0, 2], [0, 1]]


@pytest.mark.parametrize("text", ["['a', 'b']", "[1. 0.]", "(1, 0)"])
def test_invalid_csv_list_is_rejected(text, tmp_path) -> None:
    with pytest.raises(ConfigError, match="not a list of classes"):
        stored(*SEVERAL, *written(tmp_path, "csv", [text, "[0]"]))


def test_each_meaning_of_two_classes_has_an_override(tmp_path) -> None:
    rows = (*SEVERAL, *written(tmp_path, "jsonl", [[1, 0], [0, 1]]))
    both, one = (stored(*rows, f"data.multi_hot={value}") for value in ("false", "true"))
    assert classes_of(both)["row 0"] == classes_of(both)["row 1"] == [0, 1]
    assert [classes_of(one)[f"row {n}"] for n in range(2)] == [[0], [1]]


def test_stream_reads_lists_like_its_first_rows(tmp_path) -> None:
    labels = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    typed = (*SEVERAL, *written(tmp_path, "jsonl", labels), "data.streaming=true",
             "data.num_eval_samples=9", "data.shuffle_buffer=0", "train.steps=3")  # fmt: skip
    samples = build_data(planned(*typed)).train
    assert [samples[0, n]["labels"].tolist() for n in range(3)] == labels


@pytest.mark.parametrize(
    ("labels", "numbers"),
    [
        (["0.0", "1.0", "11.0"], [0, 1, 11]),
        (["0.0", "1", " 11.0"], [0, 1, 11]),
        (["0.0", "11.", "2.00"], [0, 11, 2]),
    ],
    ids=str,
)
def test_integral_csv_decimals_are_numbers(labels, numbers, tmp_path) -> None:
    typed = (*CLASSIFY, "task.num_labels=12")
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f"row {n},{labels[n % 3]}\n" for n in range(60)))
    store = stored(*typed, "data=csv", f"data.path={path}")
    assert store.manifest.label_names == ()
    assert store.array("labels")[:3].tolist() == numbers


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["404", "500", "other", "other", "other"], ("404", "500", "other")),
        (["other", "other", "other", "404", "500"], ("404", "500", "other")),
        (["01", "1", "02"], ("1", "01", "02")),
        (["0.5", "1.0", "1.5", "2.5"], ("0.5", "1.0", "1.5", "2.5")),
        (["True", "False"], ("False", "True")),
    ],
    ids=str,
)
def test_csv_texts_are_names_whatever_the_first_row(labels, names, tmp_path) -> None:
    typed = (*CLASSIFY, f"task.num_labels={len(names)}", *written(tmp_path, "csv", labels))
    store = stored(*typed)
    assert store.manifest.label_names == names
    right = [names.index(label) for label in labels]
    assert store.array("labels")[: len(labels)].tolist() == right


@pytest.mark.parametrize("labels", [["0", "?", "1"], ["?", "0", "1"], ["0", "nan", "1", ""],
                                    ["0", "01", "1", "1"], ["-1", "1"]], ids=str)  # fmt: skip
def test_csv_numbers_mixed_with_texts_are_rejected(labels, tmp_path) -> None:
    typed = (*CLASSIFY, *written(tmp_path, "csv", labels))
    with pytest.raises(ConfigError, match="label is"):
        planned(*typed)


def test_numeric_class_names_are_sorted_by_value(tmp_path) -> None:
    labels = [str(n) for n in range(12)]
    store = stored(*CLASSIFY, "task.num_labels=12", *written(tmp_path, "jsonl", labels))
    assert store.manifest.label_names == tuple(labels)
    assert store.array("labels")[:12].tolist() == list(range(12))


NEGATIVE = datasets.ClassLabel(names=["negative", "positive"])
POSITIVE = datasets.ClassLabel(names=["positive", "negative"])


@pytest.mark.parametrize("option", ["parquet", "hub"])
@pytest.mark.parametrize("more", [(), ("data.streaming=true", "data.shuffle_buffer=0",
                                       "data.num_eval_samples=8", "train.steps=3")],
                         ids=["prepared", "streamed"])  # fmt: skip
def test_dataset_class_names_keep_their_order(option, more, tmp_path) -> None:
    plan = planned(*CLASSIFY, *written(tmp_path, option, [0, 1], POSITIVE), *more)
    assert class_names(plan) == ("positive", "negative"), "not sorted"
    samples = build_data(plan).train
    for number in range(3):
        text = bytes(t - 8 for t in samples[0, number]["input_ids"] if t >= 8).decode()
        assert int(samples[0, number]["labels"]) == int(text.split()[1]) % 2


def test_list_names_and_missing_classes(tmp_path) -> None:
    lists = datasets.List(POSITIVE)
    store = stored(*SEVERAL, *written(tmp_path, "parquet", [[0], [1, 0], []], lists))
    found = [classes_of(store)[f"row {n}"] for n in range(3)]
    assert found == [["positive"], ["negative", "positive"], []]
    missing = written(tmp_path, "parquet", [0, 1, -1, None], POSITIVE, "missing")
    store = stored(*CLASSIFY, *missing)
    assert store.manifest.num_bad == 30
    assert classes_of_one(store)["row 1"] == "negative"


def classes_of_one(store) -> dict[str, str]:
    """Text of each row -> the name of its class."""
    names, found = store.manifest.label_names, {}
    for split in ("train", "evaluation"):
        rows = StoredRows(store, split, None)
        for index in range(len(rows)):
            text = bytes(int(t) - 8 for t in rows.row(index).tokens if t >= 8).decode()
            found[text] = names[int(rows.label(index))]
    return found


def test_files_with_different_class_numbers(tmp_path) -> None:
    typed = written(tmp_path, "parquet", [0, 1], NEGATIVE)
    other = written(tmp_path, "parquet", [0, 1], POSITIVE, "b")
    store = stored(*CLASSIFY, *typed, other[1].replace("data.path", "data.eval_path"))
    assert store.manifest.label_names == ("negative", "positive")
    labels = store.array("labels")
    assert labels[store.array("train")][:2].tolist() == [0, 1]
    assert labels[store.array("evaluation")][:2].tolist() == [1, 0]


@pytest.mark.parametrize("metadata", [b"", b"[]", b"7", b'{"info": {"features": {"label": 3}}}',
                                      b'{"info": {"features": {"label": []}}}'])  # fmt: skip
def test_foreign_parquet_metadata_names_no_classes(metadata, tmp_path) -> None:
    table = pyarrow.table({"text": [f"row {n}" for n in range(60)], "label": [0, 1] * 30})
    table = table.replace_schema_metadata({b"huggingface": metadata})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    store = stored(*CLASSIFY, "data=parquet", f"data.path={tmp_path / 'a.parquet'}")
    assert store.manifest.label_names == ()


def test_numeric_names_are_ignored_and_regression_has_no_names(tmp_path) -> None:
    numbers = written(tmp_path, "parquet", [0, 1], datasets.ClassLabel(num_classes=2))
    assert stored(*CLASSIFY, *numbers).manifest.label_names == ()
    rated = written(tmp_path, "parquet", [0, 1], NEGATIVE, "rated")
    assert stored(*NUMBERS, *rated).array("values")[:2].tolist() == [0, 1]


TYPED = "task.labels=[negative,positive]"


@pytest.mark.parametrize(
    ("option", "labels", "features"),
    [
        ("jsonl", [0, 1], None), ("jsonl", [False, True], None), ("csv", ["0.0", "1.0"], None),
        ("parquet", [0, 1], None), ("parquet", [0, 1], NEGATIVE), ("parquet", [1, 0], POSITIVE),
        ("hub", [0, 1], datasets.ClassLabel(names=["bad", "good"])),
        ("csv", ["negative", "positive"], None), ("jsonl", ["Negative", "POSITIVE"], None),
    ],
)  # fmt: skip
def test_configured_class_names_are_used(option, labels, features, tmp_path) -> None:
    store = stored(*CLASSIFY, TYPED, *written(tmp_path, option, labels, features))
    assert store.manifest.label_names == ("negative", "positive")
    assert store.array("labels")[:2].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("labels", "features"),
    [(["good", "bad"], None), ([0, 1], datasets.ClassLabel(names=["negative", "good"]))],
)
def test_unlisted_class_names_are_rejected(labels, features, tmp_path) -> None:
    option = "jsonl" if features is None else "parquet"
    with pytest.raises(ConfigError, match=r"has the classes .*good.*negative, positive") as caught:
        stored(*CLASSIFY, TYPED, *written(tmp_path, option, labels, features))
    fix = caught.value.problems[0].fix.words[0]
    again = written(tmp_path, option, labels, features, "again")
    assert "good" in stored(*CLASSIFY, fix, *again).manifest.label_names


def test_more_names_than_classes_are_rejected(tmp_path) -> None:
    three = datasets.ClassLabel(names=["a", "b", "c"])
    with pytest.raises(ConfigError) as caught:
        stored(*CLASSIFY, *written(tmp_path, "parquet", [0, 1, 2], three))
    assert str(caught.value.problems[0].fix) == "task.num_labels=3"
    unused = written(tmp_path, "parquet", [0, 1], three, "unused")
    assert stored(*CLASSIFY, *unused).manifest.label_names == ("a", "b")
