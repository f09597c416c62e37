"""Input that cannot be used: one clear message each, with a fix, and nothing half-written."""

import bz2
import csv
import gzip
import json
import lzma
import os
import re
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from prepared import BERT, GPT, numbered, save_bpe, write_jsonl
from support import environment
from unit.plan.cases import config_of, decision, plan_of

from eke.common.errors import ConfigError
from eke.data.preparation.lines import Columns, lines, parquet_rows
from eke.data.preparation.rows import prepare_store
from eke.data.sources import PrepareRequest, request_of

GOOD = "".join(json.dumps(row) + "\n" for row in numbered(300)).encode()


def refusal(*overrides):
    """The problems of preparing in this process."""
    with pytest.raises(ConfigError) as caught:
        prepare_store(request_of(config_of(*overrides)))
    return caught.value.problems


def left_behind(cache):
    """Names in the cache's folder of stores, locks left out."""
    folder = cache / "eke" / "data"
    return (
        sorted(p.name for p in folder.glob("*") if p.suffix != ".lock") if folder.exists() else []
    )


WHOLE_FILES = {
    "empty": ("jsonl", b"", "data.path", "is empty"),
    "blank lines": ("jsonl", b"\n  \n\n", "data.path", "all of 3 rows are empty"),
    "one array": ("jsonl", b'[{"text": "a"}]', "data.path", "is a list, not one object"),
    "an indented array": ("jsonl", b'[\n  {\n    "text": "a"', "data.path", "is a list, not one"),
    "no json": ("jsonl", b"text\nmore text\n", "data.path", r"a.jsonl:1 is not JSON"),
    "wrong column": ("jsonl", b'{"txet": "a"}\n' * 3, "data.text", "Columns: txet"),
    "all nulls": ("jsonl", b'{"text": null}\n' * 2, "data.path", "text is null, not text"),
    "all nested": ("jsonl", b'{"text": {"a": 1}}\n' * 2, "data.path", "text is an object"),
    "utf-16": ("jsonl", GOOD.decode().encode("utf-16"), "data.path", "is UTF-16, not UTF-8"),
    "semicolons": ("csv", b"text;label\na;1\n", "data.path", "by ';', not by commas"),
    "one row": ("jsonl", b'{"text": "a"}\n', "data.path", "no usable row to evaluate"),
    "csv without the column": ("csv", b"txt,label\na,b\n", "data.text", "Columns: txt, label"),
    "csv with a column twice": ("csv", b"text,text\na,b\n", "data.path", "names text twice"),
    "csv header only": ("csv", b"text\n", "data.path", "has no rows"),
    "no parquet": ("parquet", GOOD, "data.path", "not a parquet file"),
    "cut gzip": (
        "jsonl.gz",
        gzip.compress(GOOD)[:-40],
        "data.path",
        "Compressed file ended before",
    ),
    "no xz": ("jsonl.xz", GOOD, "data.path", "cannot be read: Input format not supported"),
}


@pytest.mark.parametrize("case", WHOLE_FILES.values(), ids=WHOLE_FILES.keys())
def test_unusable_file_has_one_message(case, tmp_path, own_cache) -> None:
    ending, content, path, words = case
    file = tmp_path / f"a.{ending}"
    file.write_bytes(content)
    (problem,) = refusal(f"data={ending.split('.')[0]}", f"data.path={file}")
    assert problem.key == path
    assert re.search(words, problem.why)
    assert str(problem.fix).startswith("data")
    assert left_behind(own_cache) == []


def test_file_name_may_contain_a_semicolon(tmp_path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("text;1\none\ntwo\n")
    plan = plan_of("data=csv", f"data.path={file}", "data.text='text;1'", "batch.per_device=1")
    assert decision(plan, "data rows")[0] == "2"


def test_proposed_separator_fix_works(tmp_path) -> None:
    file = tmp_path / "a b.csv"
    file.write_text('text;label\n"one; two";0\n"three, four";1\n')
    (problem,) = refusal("data=csv", f"data.path='{file}'")
    command = str(problem.fix).partition("(made by: ")[2][:-1].replace("NEW_FILE", "new.csv")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    plan = plan_of("data=csv", f"data.path={tmp_path / 'new.csv'}", "batch.per_device=1")
    value, reason = decision(plan, "data rows")
    assert (value, "0 bad" in reason) == ("2", True)


def test_table_without_rows_is_rejected_unless_other_tables_have_rows(tmp_path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    kind = pyarrow.string()
    for name, texts in (("0", []), ("1", ["one", "two", "three"])):
        table = pyarrow.table({"text": pyarrow.array(texts, kind)})
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
    (problem,) = refusal("data=parquet", f"data.path={folder / '0.parquet'}")
    assert problem.why == "has no rows"
    plan = plan_of("data=parquet", f"data.path={folder}", "batch.per_device=1")
    assert decision(plan, "data rows")[0] == "3"


ROWS = {
    "not json": (b'{"text": "cut', "is not JSON"),
    "a list": (b"[1, 2]", "is a list, not an object"),
    "a number": (b"5", "is one value, not an object"),
    "no column": (b'{"txt": "a"}', "has no text"),
    "null": (b'{"text": null}', "text is null, not text"),
    "a number as text": (b'{"text": 5}', "text is the number 5, not text"),
    "nested": (b'{"text": ["a"]}', "text is a list, not text"),
    "not utf-8": (b'{"text": "\xff"}', r"is not UTF-8 \(byte 11\)"),
    "half a surrogate": (b'{"text": "\\ud800"}', r"text is not UTF-8 \(character 1\)"),
    "endless nesting": (b"[" * 200_000, "is not JSON"),
}


@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS.keys())
def test_bad_row_is_counted_and_named(case, tmp_path) -> None:
    line, words = case
    lines = GOOD.splitlines()
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join([*lines[:6], line, *lines[6:]]) + b"\n")
    plan = plan_of("data=jsonl", f"data.path={file}", "data.seq_len=16", "train.steps=1")
    value, reason = decision(plan, "data rows")
    assert value == "300"
    assert "1 bad, 0 empty" in reason
    assert re.search("a.jsonl:7 " + words, reason)


def test_too_many_bad_rows_are_rejected_with_the_needed_share(tmp_path, in_another_process) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(GOOD + b"bad\n" * 9)
    typed = ("data=jsonl", f"data.path={file}", "data.seq_len=16", "train.steps=1")
    with pytest.raises(ConfigError) as caught:
        plan_of(*typed)
    (problem,) = caught.value.problems
    assert "9 of 309 rows cannot be used (2.91%), more than data.max_bad_frac = 0.01" in problem.why
    assert "a.jsonl:301 is not JSON (character 1); a.jsonl:302" in problem.why
    assert str(problem.fix) == "data.max_bad_frac=0.03"
    assert plan_of(*typed, str(problem.fix)).steps.num_train_samples > 200


def test_bom_crlf_blank_lines_and_nel_are_read_correctly(tmp_path) -> None:
    """Byte order mark, Windows line ends, blank lines, no end of the last line, a NEL character."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "tw\xc2\x85o"}\r\n{"text": "three"}'
    )
    plan = plan_of("data=jsonl", f"data.path={file}", "batch.per_device=1", "train.steps=1")
    value, reason = decision(plan, "data rows")
    assert value == "3"
    assert "0 bad, 1 empty" in reason


def test_csv_of_spreadsheets_is_read(tmp_path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(
        b'\xef\xbb\xbftext,label\r\n"with, comma",1\r\n"two\r\nlines ""quoted""",0\r\n\r\n'
        b"too,many,values\r\nfew\r\n\xff,1\r\nplain,0\r\n"
    )
    typed = ("data=csv", f"data.path={file}", "model=tiny_bert", "task=sequence_classification",
             "data.max_bad_frac=0.5", "batch.per_device=1", "train.steps=1")  # fmt: skip
    value, reason = decision(plan_of(*typed), "data rows")
    assert value == "3"
    assert "3 bad, 1 empty" in reason
    assert "a.csv:6 " in reason


@pytest.mark.parametrize("option", ["csv", "parquet"])
def test_tables_with_different_columns_are_rejected(option, tmp_path, own_cache) -> None:
    """The column that a mistake names must be one that can be typed: here the first file's."""
    for name, column in (("1", "body"), ("2", "content")):
        file = tmp_path / "tables" / f"{name}.{option}"
        file.parent.mkdir(exist_ok=True)
        rows = [f"row {number}" for number in range(9)]
        if option == "csv":
            file.write_text("\n".join([column, *rows]) + "\n")
        else:
            pyarrow.parquet.write_table(pyarrow.table({column: rows}), file)
    folder = ("data.path=" + str(tmp_path / "tables"), f"data={option}")
    (column,) = refusal(*folder)
    assert column.key == "data.text"
    assert str(column.fix) == "data.text=body"
    (unlike,) = refusal(*folder, str(column.fix))
    assert unlike.key == "data.path"
    assert unlike.value.endswith(f"2.{option}")
    assert f"1.{option}. Columns: content" in unlike.why
    assert str(unlike.fix) == f"data.path={tmp_path}/tables/1.{option}"
    assert plan_of(
        f"data={option}", str(column.fix), str(unlike.fix), "batch.per_device=1", "train.steps=1"
    )


def test_evaluation_file_with_different_columns_is_rejected(tmp_path) -> None:
    train, evaluation = tmp_path / "train.csv", tmp_path / "eval.csv"
    train.write_text("text\none\ntwo\n")
    evaluation.write_text("body\none\ntwo\n")
    (unlike,) = refusal("data=csv", f"data.path={train}", f"data.eval_path={evaluation}")
    assert (unlike.key, unlike.value) == ("data.eval_path", str(evaluation))
    assert str(unlike.fix) == "data.eval_path=FILE"


def test_proposed_column_name_is_a_valid_override(tmp_path) -> None:
    file = tmp_path / "a.csv"
    typed = ("data=csv", f"data.path={file}", "batch.per_device=1", "train.steps=1")
    for column in ("what, if", "it's", 'the "text"', "two words", "null", "a=b"):
        with file.open("w", newline="") as opened:
            csv.writer(opened).writerows([[column], *[[f"row {n}"] for n in range(9)]])
        (problem,) = refusal(*typed)
        assert plan_of(*typed, *problem.overrides).steps.num_train_samples == 8, column


def test_unclosed_quote_is_one_bad_row(tmp_path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('text\none\ntwo\n"open\nthree\n')
    typed = ("data=csv", f"data.path={file}", "data.max_bad_frac=0.5", "batch.per_device=1")
    value, reason = decision(plan_of(*typed, "train.steps=1"), "data rows")
    assert value == "2"
    assert "a.csv:4 " in reason


CLASSIFY = ("data=jsonl", "model=tiny_bert", "task=sequence_classification", "train.steps=1")


def test_missing_column_has_a_proposal(tmp_path) -> None:
    """The name that is nearest, or the only one; never just the first of several."""
    fixes = {("txet", "id"): "txet", ("body",): "body", ("ask", "reply"): "COLUMN"}
    for columns, fix in fixes.items():
        file = write_jsonl(tmp_path / "a.jsonl", [dict.fromkeys(columns, "a")] * 3)
        (problem,) = refusal("data=jsonl", f"data.path={file}")
        assert str(problem.fix) == f"data.text={fix}"


def test_prompt_and_response_columns_are_proposed(tmp_path) -> None:
    pairs = ("prompt", "completion"), ("instruction", "output"), ("Question", "Answer")
    for prompt, response in pairs:
        row = {"id": "a", prompt: "some words", response: "some words"}
        file = write_jsonl(tmp_path / "a.jsonl", [row] * 3)
        (problem,) = refusal("data=jsonl", f"data.path={file}")
        assert str(problem.fix) == f"data.prompt={prompt} data.response={response}"
        plan_of("data=jsonl", f"data.path={file}", "data.num_eval_samples=1", "train.steps=1",
                "batch.per_device=1", *str(problem.fix).split())  # fmt: skip


def test_file_of_another_format_is_rejected(tmp_path) -> None:
    """A CSV reader takes the first row for names of columns; data=text trains on markup."""
    for option, name, meant in (
        ("csv", "a.jsonl", "jsonl"),
        ("csv", "a.parquet", "parquet"),
        ("csv", "a.txt", "text"),
        ("text", "a.csv", "csv"),
        ("parquet", "a.txt", "text"),
        ("parquet", "a.jsonl.gz", "jsonl"),
        ("jsonl", "a.md", "text"),
    ):
        (tmp_path / name).write_text("some text\n" * 9)
        with pytest.raises(ConfigError) as caught:
            plan_of(f"data={option}", f"data.path={tmp_path / name}")
        (problem,) = caught.value.problems
        assert (problem.key, str(problem.fix)) == ("data.path", f"data={meant}"), name


ONE_CLASS = r"\d+ training rows have the label "


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([1], f"{ONE_CLASS}1$"),
        (["same"], f"{ONE_CLASS}same$"),
        # A share of bad rows would be proposed, and one class be learnt.
        ([1, -1], "a.jsonl:2 label is -1, outside 0 to 1"),
    ],
    ids=["number", "text", "others dropped"],
)
def test_single_class_is_rejected(labels, words, tmp_path) -> None:
    rows = [{"text": f"row {n}", "label": labels[n % len(labels)]} for n in range(60)]
    (problem,) = refusal(*CLASSIFY, f"data.path={write_jsonl(tmp_path / 'a.jsonl', rows)}")
    assert problem.key == "data.label"
    assert re.search(words, problem.why)
    if labels[1:] == []:
        assert str(problem.fix) == "data.label=COLUMN"


@pytest.mark.parametrize(
    ("special", "task", "words"),
    [
        (BERT, (), "is smaller than the 286 tokens of data.tokenizer="),
        (GPT, ("model=tiny_bert", "task=masked_lm"), "has no mask token"),
        ({"unk_token": "?"}, ("model=tiny_t5", "task=sequence_classification"), "writes no EOS"),
    ],
    ids=["too large", "no mask", "no end"],
)
def test_unsuitable_tokenizers_are_rejected(special, task, words, tmp_path) -> None:
    folder = save_bpe(tmp_path / "tokenizer", special)
    file = write_jsonl(
        tmp_path / "a.jsonl", [{**row, "label": n % 2} for n, row in enumerate(numbered(40))]
    )
    typed = ("data=jsonl", f"data.path={file}", f"data.tokenizer={folder}", *task, "train.steps=1")
    small = ("model.vocab_size=280",)
    with pytest.raises(ConfigError) as caught:
        plan_of(*typed, *small)
    found = next(each for each in caught.value.problems if words in each.why)
    fix = str(found.fix)
    assert fix in ("model.vocab_size=286", "data.tokenizer=bytes")
    assert plan_of(*typed, *small, fix).steps.num_train_samples > 10


@pytest.mark.slow
def test_missing_tokenizer_is_reported(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    file = write_jsonl(tmp_path / "a.jsonl", numbered(40))
    for name in ("nowhere/at-all", tmp_path / "empty", file):
        (problem,) = refusal("data=jsonl", f"data.path={file}", f"data.tokenizer={name}")
        assert problem.key == "data.tokenizer", name
        assert "AutoTokenizer" in problem.why


@pytest.mark.parametrize(
    ("typed", "key", "words"),
    [
        ("data.path={tmp}/nowhere.jsonl", "data.path", "no such file"),
        ("data.path={tmp}/*.nothing", "data.path", "no such file"),
        ("data.path={tmp}/folder", "data.path", "matches .*: .md"),
        ("data.path={tmp}/a.jsonl data.eval_path={tmp}/b.jsonl", "data.eval_path", "no such file"),
        ("data.path={tmp}/" + "x" * 300, "data.path", "no such file"),
    ],
    ids=["file", "glob", "folder", "evaluation", "long"],
)
def test_missing_files_are_reported(typed, key, words, tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.md").write_text("notes")
    write_jsonl(tmp_path / "a.jsonl", numbered(3))
    with pytest.raises(ConfigError, match=words) as caught:
        request_of(config_of("data=jsonl", *typed.format(tmp=tmp_path).split()))
    assert caught.value.problems[0].key == key
    assert caught.value.problems[0].fix.words[0].startswith("data.")


def test_fifo_is_rejected(tmp_path) -> None:
    os.mkfifo(tmp_path / "rows")
    for option in ("jsonl", "csv", "parquet", "text", "chat"):
        with pytest.raises(ConfigError) as caught:
            plan_of(f"data={option}", f"data.path={tmp_path / 'rows'}")
        assert [problem.key for problem in caught.value.problems] == ["data.path"], option


def test_unreadable_file_is_reported(tmp_path, monkeypatch) -> None:
    # root may read everything, so a folder stands in for a file that cannot be opened.
    file = tmp_path / "a.jsonl"
    file.mkdir()
    monkeypatch.setattr("pathlib.Path.is_dir", lambda path: False)
    monkeypatch.setattr("pathlib.Path.is_file", lambda path: path == file or os.path.isfile(path))
    with pytest.raises(ConfigError, match="Is a directory"):
        request_of(config_of("data=jsonl", f"data.path={file}"))


def test_unsupported_parquet_types_are_reported(tmp_path) -> None:
    texts = [None if n % 3 == 1 else f"text {n}" for n in range(60)]
    table = pyarrow.table({"text": texts, "label": [0.0, 1.0, 1.0] * 20})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    typed = ("data=parquet", f"data.path={tmp_path}", "model=tiny_bert", "train.steps=1",
             "task=sequence_classification")  # fmt: skip
    with pytest.raises(ConfigError, match=r"a.parquet row 2 text "):
        plan_of(*typed)
    assert decision(plan_of(*typed, "data.max_bad_frac=0.34"), "data rows")[0] == "40"
    numbers = pyarrow.table({"text": [1, 2, 3]})
    pyarrow.parquet.write_table(numbers, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="the number 1"):
        plan_of("data=parquet", f"data.path={tmp_path}", "train.steps=1")


@pytest.mark.parametrize("option", ["csv", "jsonl", "parquet"])
def test_pattern_that_matches_other_formats_is_reported(option, tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("some text\n" * 9)
    (tmp_path / "a.csv").write_text("text\n" + "some text\n" * 9)
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n' * 9)
    table = pyarrow.table({"text": ["some text"] * 9})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    command = (f"data={option}", f"data.path={tmp_path}", "train.steps=1")
    (problem,) = refusal(*command, "data.pattern='*'")
    assert (problem.key, str(problem.fix)) == ("data.pattern", "data.pattern=null")
    plan_of(*command, "data.pattern=null")


def test_damaged_parquet_file_is_reported(tmp_path) -> None:
    whole = tmp_path / "whole.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"text {n}" for n in range(5000)]}), whole)
    damaged = bytearray(whole.read_bytes())
    damaged[100:2000] = os.urandom(1900)
    (tmp_path / "a.parquet").write_bytes(damaged)
    (problem,) = refusal("data=parquet", f"data.path={tmp_path / 'a.parquet'}")
    assert problem.key == "data.path"


def test_very_long_line_is_truncated(tmp_path) -> None:
    file = tmp_path / "a.jsonl"
    with open(file, "wb") as opened:
        opened.write(GOOD + b'{"text": "' + b"word " * (1 << 15) + b'"}\n')
    typed = ("data=jsonl", f"data.path={file}", "data.seq_len=32", "train.steps=1")
    with pytest.raises(ConfigError, match=rf"line 301 of {re.escape(str(file))} is longer") as why:
        plan_of(*typed, "data.max_row_bytes=100000")
    (problem,) = why.value.problems
    plan = plan_of(*typed, str(problem.fix).split()[0])
    assert "0 bad, 0 empty (excluded), 1 truncated" in decision(plan, "data rows")[1]


PEAK = """
import re
from pathlib import Path
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10)
"""
"""Of this program alone: ru_maxrss begins with what the process had that has started it."""

READ = """
import sys
from eke.data.sources import PrepareRequest
from eke.data.preparation.lines import Columns
from eke.data.preparation.lines import csv_rows, jsonl_rows, parquet_rows
reader = csv_rows if "csv" in sys.argv[1] else jsonl_rows
reader = parquet_rows if "parquet" in sys.argv[1] else reader
request = PrepareRequest("jsonl", "", "", text="text", max_row_bytes=16 << 20)
try:
    print(sum(1 for row in reader("a", sys.argv[1], Columns(request))), "rows")
except Exception as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "values.csv.gz"])
def test_file_with_one_long_line_takes_little_memory(name, tmp_path) -> None:
    """400 MB in 400 kB: members of a gzip file are one after another."""
    member = gzip.compress((b"a value,\n" if name == "values.csv.gz" else b"a" * 9) * (11 << 17))
    start = b'text,b\n"' if "csv" in name else b'{"text": "'
    (tmp_path / name).write_bytes(gzip.compress(start) + member * 30)
    done = subprocess.run(
        [sys.executable, "-c", READ + PEAK, str(tmp_path / name)],
        env=environment(tmp_path), capture_output=True, text=True, check=True,
    )  # fmt: skip
    *said, memory = done.stdout.splitlines()
    assert "data.max_row_bytes" in " ".join(said)
    assert f"of {tmp_path / name} is longer" in " ".join(said)
    assert int(memory) < 200 << 20


MIB = "moss and gravel " * (1 << 16)

HUGE_PARQUET = {
    "shared": ([MIB] * 1000, "1000 rows"),
    "shared, nested": ([[{"role": "user", "content": MIB}]] * 1000, "1000 rows"),
    "one page of distinct texts": ([f"{n} {MIB}" for n in range(200)], "200 rows"),
    "shared, in one row": ([[MIB] * 1000], "too much memory"),
    "one text": (["a", "a" * (100 << 20)], "data.max_row_bytes"),
    "numbers": ([[0] * (3 << 20)] * 4, "data.max_row_bytes"),
}
"""Rows of a column, small as a file, and what is said of them."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", HUGE_PARQUET)
def test_small_parquet_file_takes_little_memory(kind, tmp_path) -> None:
    rows, wanted = HUGE_PARQUET[kind]
    array = pyarrow.array(rows)
    table = pyarrow.table({"text": array.dictionary_encode() if kind == "shared" else array})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    del array, table
    done = subprocess.run(
        [sys.executable, "-c", READ + PEAK, str(tmp_path / "a.parquet")],
        env=environment(tmp_path), capture_output=True, text=True, check=True,
    )  # fmt: skip
    *said, memory = done.stdout.splitlines()
    assert wanted in " ".join(said)
    # A page of 100 MB is decompressed as a whole before its rows can be measured.
    assert int(memory) < 700 << 20


COLUMNS = {
    "text": ["a", None, "", "é" * 300] * 3,
    "nested": [[{"role": "user", "content": "a"}], [], None, [{"role": "b", "content": None}]] * 3,
    "lists": [[["a"], None, ["b" * 300, "c"]], None, [[]], []] * 3,
    "numbers": [[1, None, 2], [], None, [3]] * 3,
    "bytes": [b"a", None, b"", b"c"] * 3,
    "class": pyarrow.array([3, 5, 3, None] * 3).dictionary_encode(),
    "map": pyarrow.array([[("a", "b")], None, [], [("c", None)]] * 3,
                         pyarrow.map_(pyarrow.string(), pyarrow.string())),
    "pair": pyarrow.array([[1.0, 2.0]] * 12, pyarrow.list_(pyarrow.float32(), 2)),
    "null": pyarrow.nulls(12),
    "view": pyarrow.array(["a", None, "", "c" * 300] * 3, pyarrow.large_string()),
    "with.dot": ["a"] * 12,
}  # fmt: skip


@pytest.mark.parametrize("limit", [16 << 20, 4000])
def test_parquet_rows_match_arrow(limit, tmp_path) -> None:
    table = pyarrow.table(COLUMNS)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    request = PrepareRequest("parquet", "", "", max_row_bytes=limit)
    rows = list(parquet_rows("a", str(tmp_path / "a.parquet"), Columns(request)))
    assert [values for _, values in rows] == table.to_pylist()
    assert [place for place, _ in rows] == [f"a row {number}" for number in range(1, 13)]


def test_long_parquet_row_is_rejected_with_its_number(tmp_path) -> None:
    texts = ["a"] * 600 + ["b" * 5000] + ["c"] * 600
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=500)
    typed = ("data=parquet", f"data.path={tmp_path}", "train.steps=1")
    (problem,) = refusal(*typed, "data.max_row_bytes=4000")
    assert problem.key == "data.max_row_bytes"
    assert "row 601 of" in problem.why
    plan_of(*typed, problem.overrides[0])


def test_longest_row_does_not_change_the_run_id(tmp_path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", numbered(300))
    typed = ("data=jsonl", f"data.path={file}", "data.seq_len=32", "train.steps=1")
    assert plan_of(*typed, f"data.max_row_bytes={1 << 20}").run_id == plan_of(*typed).run_id
    assert refusal(*typed, "data.max_row_bytes=5", "data.eval_frac=0.2")


@pytest.mark.slow
def test_memory_is_independent_of_file_size(tmp_path, own_cache) -> None:
    """The preparing process alone: two files, one 30 MiB larger than the other."""
    peaks = []
    for number, size in enumerate((5, 35)):
        file = tmp_path / f"{number}.jsonl"
        line = b'{"text": "' + b"some words of a text " * 20 + b'%d"}\n'
        with open(file, "wb") as opened:
            for n in range(size * 2**20 // len(line)):
                opened.write(line % n)
        request = request_of(config_of("data=jsonl", f"data.path={file}", "data.seq_len=512"))
        code = f"from eke.data.preparation.__main__ import _main\nassert _main() == 0\n{PEAK}"
        done = subprocess.run(
            [sys.executable, "-c", code], input=request.to_json(), text=True,
            env={**environment(tmp_path), "XDG_CACHE_HOME": str(own_cache)},
            capture_output=True, check=True,
        )  # fmt: skip
        peaks.append(int(done.stderr.splitlines()[-1]))  # its standard output is the answer alone
    assert peaks[1] - peaks[0] < 18 * 2**20, peaks


@pytest.mark.parametrize("ending", ["", ".gz", ".bz2", ".xz"])
def test_compressed_files_of_any_encoding_are_read_alike(ending, tmp_path) -> None:
    """The datasets library decodes compressed streams as UTF-8 whatever is asked for."""
    content = '{"text": "\u65e5\u672c na\u00efve"}\n'.encode() * 30 + b'{"text": "\xe9"}\n'
    pack = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[ending]
    file = tmp_path / f"a.jsonl{ending}"
    file.write_bytes(pack(content))
    found = list(lines(str(file), 1 << 20))
    assert [number for number, _ in found] == list(range(1, 32))
    assert b"".join(text.encode("latin-1") for _, text in found) == content
