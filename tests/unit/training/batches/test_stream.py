"""Which row of a stream comes when, what is read for it, and rows that cannot be used."""

import json
import random
from collections import Counter
from itertools import count, islice

import numpy as np
import pytest
from prepared import save_bpe, texts_of, write_jsonl
from unit.plan.cases import config_of, plan_of

from eke.common.errors import ChangedError, ConfigError, RunError
from eke.data.preparation import lines, rows
from eke.data.preparation.rows import prepare_store
from eke.data.sources import Store, mix_seed, read_manifest, request_of, store_folder
from eke.plan.planner import Plan, simulated_micro_batches
from eke.training.batches.dataset import build_data
from eke.training.batches.stream import StreamedRows
from eke.training.batches.tasks import open_split

STREAM = (
    "model=tiny", "data=jsonl", "data.streaming=true", "data.shuffle_buffer=4", "train.steps=20",
    "data.num_eval_samples=5", "data.seq_len=64", "batch.per_device=2",
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> None:
    """Stores of these tests are their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def texts(numbers) -> list[str]:
    return [f"row {n}" for n in numbers]


def write(path, number: int = 30, bad=(), blank=()):
    """So many rows `row N`, of which some are no JSON or a blank line."""
    made = [
        json.dumps({"text": text, "label": n % 2}) for n, text in enumerate(texts(range(number)))
    ]
    for n in bad:
        made[n] = "{"
    for n in blank:
        made[n] = ""
    path.write_text("\n".join(made) + "\n")
    return path


def planned(*overrides: str) -> Plan:
    """A plan whose store is prepared in this process, which is quicker."""
    prepare_store(request_of(config_of(*STREAM, *overrides)))
    return plan_of(*STREAM, *overrides)


def opened(plan: Plan) -> StreamedRows:
    found = open_split(plan, evaluation=False).source
    assert isinstance(found, StreamedRows)
    return found


def source_of(*overrides: str) -> StreamedRows:
    return opened(planned(*overrides))


def read(source: StreamedRows, numbers) -> list[str]:
    """The texts of some samples."""
    rows_of = (source.row(n).tokens for n in numbers)
    return [bytes(int(t) - 8 for t in tokens if t >= 8).decode() for tokens in rows_of]


def by_hand(kept: list[str], size: int, seed: int) -> list[str]:
    """Passes through a shuffle buffer, forty items."""
    found = []
    for epoch in count():
        rng, left, buffer = random.Random(mix_seed(seed, epoch)), iter(kept), []
        buffer += islice(left, size)
        while buffer:
            place = int(rng.random() * len(buffer))
            buffer[place], buffer[-1] = buffer[-1], buffer[place]
            found.append(buffer.pop())
            buffer += islice(left, 1)
        if len(found) >= 60:
            return found
    raise AssertionError


@pytest.mark.parametrize(("size", "seed"), [(0, 0), (1, 7), (4, 0), (4, 7), (1000, 7)])
def test_order_depends_on_seed_and_buffer(size, seed, tmp_path) -> None:
    path = write(tmp_path / "rows.jsonl", blank=(2, 9))
    more = (f"data.path={path}", f"data.shuffle_buffer={size}", f"seed={seed}")
    kept = texts([*range(6, 9), *range(10, 30)])
    expected = by_hand(kept, max(1, size), seed)
    assert read(source_of(*more), range(60)) == expected[:60]
    assert sorted(expected[:23]) == sorted(kept) == sorted(expected[23:46])
    if size < 2:
        assert expected[:46] == kept * 2
    else:
        assert expected[:23] != expected[23:46] != kept, "each epoch is shuffled anew"


@pytest.mark.parametrize("option", ["jsonl", "csv", "parquet"])
def test_stream_can_skip_rows(option, tmp_path) -> None:
    path = write(tmp_path / "rows.jsonl")
    if option != "jsonl":
        import pandas

        frame = pandas.read_json(path, lines=True)
        path = tmp_path / f"rows.{option}"
        frame.to_csv(path, index=False) if option == "csv" else frame.to_parquet(path)
    plan = planned(f"data={option}", f"data.path={path}")
    whole = read(opened(plan), range(90))
    for start, step in ((0, 3), (1, 7), (24, 1), (25, 1), (26, 5), (80, 1)):
        assert read(opened(plan), range(start, 90, step)) == whole[start::step]
    assert read(opened(plan), [40, 3, 3, 60]) == [whole[n] for n in (40, 3, 3, 60)]


def test_rows_of_other_ranks_are_not_parsed(tmp_path, monkeypatch) -> None:
    source = source_of(f"data.path={write(tmp_path / 'rows.jsonl', 3000)}")
    made, yielded, parse, text = [], [], lines._parse, lines._read_lines
    monkeypatch.setattr(lines, "_parse", lambda *a: made.append(a) or parse(*a))
    monkeypatch.setattr(lines, "_read_lines", lambda *a: (yielded.append(t) or t for t in text(*a)))
    source.row(2000)
    assert len(made) == 1
    assert len(source._buffer) == 4
    assert len(yielded) == 5 + 4 + 2001, "no more was read than asked for"


def test_evaluation_rows_are_never_trained(tmp_path) -> None:
    path = write(tmp_path / "rows.jsonl", 300, bad=(1,), blank=(3,))
    plan = planned(f"data.path={path}", "data.max_bad_frac=0.1")
    store = Store(folder := store_folder(plan.store), read_manifest(folder))
    held = texts([0, 2, 4, 5, 6])
    assert texts_of(store, "evaluation") == held
    found = read(open_split(plan, evaluation=False).source, range(600))
    assert set(found) == set(texts(range(7, 300)))


def test_evaluation_may_have_its_own_files(tmp_path) -> None:
    path, other = write(tmp_path / "rows.jsonl", 20), write(tmp_path / "other.jsonl", 9)
    plan = planned(f"data.path={path}", f"data.eval_path={other}")
    assert plan.steps.num_eval_samples == 5
    assert set(read(open_split(plan, evaluation=False).source, range(20))) == set(texts(range(20)))


def test_num_samples_is_the_length_of_an_epoch(tmp_path) -> None:
    typed = (f"data.path={write(tmp_path / 'rows.jsonl')}", "data.num_samples=7")
    plan = planned(*typed, "train.steps=null", "train.epochs=3")
    assert (plan.steps.per_epoch, plan.steps.total) == (4, 12)
    found = read(source_of(*typed), range(21))
    for epoch in range(3):
        assert sorted(found[epoch * 7 :][:7]) == sorted(texts(range(5, 12)))
    data = build_data(plan)
    keys = [key for step in data.order().steps(0, 12) for key in step]
    assert keys == [(n // 7, n) for n in range(21)]
    assert list(data.order().steps(5, 12)) == list(data.order().steps(0, 12))[5:]


def test_steps_set_the_epoch_length_by_default(tmp_path) -> None:
    plan = planned(f"data.path={write(tmp_path / 'rows.jsonl')}")
    assert plan.steps.num_train_samples == 40
    assert simulated_micro_batches(plan).longest.source == 64, "rows to come may be as long as any"
    assert build_data(plan).longest_step(3) == 3


def test_bad_row_is_replaced_by_the_next(tmp_path) -> None:
    path = write(tmp_path / "rows.jsonl", 40, bad=(8, 9, 20))
    typed = (f"data.path={path}", "data.max_bad_frac=0.2")
    for size in (0, 4):
        plan = planned(*typed, f"data.shuffle_buffer={size}")
        found = read(opened(plan), range(35))
        counts = Counter(found)
        assert set(counts) == set(texts([*range(5, 8), *range(10, 20), *range(21, 40)]))
        assert sum(counts.values()) - len(counts) == 3
        again = opened(plan)
        assert sum(again.read_row(n)[2] for n in range(35)) >= 3
        assert read(opened(plan), range(20, 35)) == found[20:]


def test_too_many_bad_rows_end_the_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rows, "NUM_PREVIEW_ROWS", 100)
    path = write(tmp_path / "rows.jsonl", 400, bad=range(300, 320))
    source = source_of(f"data.path={path}")
    with pytest.raises(RunError, match=r"[45] of 40\d rows .*: rows.jsonl:\d+ "):
        read(source, range(395))
    fixed = source_of(f"data.path={path}", "data.max_bad_frac=0.06")
    assert len(read(fixed, range(395))) == 395


def test_bad_first_rows_reject_the_run(tmp_path) -> None:
    path = write(tmp_path / "rows.jsonl", 40, bad=(8, 9, 20))
    with pytest.raises(ConfigError, match="3 of 40 rows"):
        source_of(f"data.path={path}")


def test_single_bad_conversation_ends_the_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rows, "NUM_PREVIEW_ROWS", 10)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    folder = save_bpe(tmp_path / "tokenizer", special)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    turns = [
        [{"role": "user", "content": f"row {n}"}, {"role": "assistant", "content": f"answer {n}"}]
        for n in range(40)
    ]
    turns[30] = turns[30][:1]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": each} for each in turns])
    typed = (
        "data=chat", f"data.path={path}", f"data.tokenizer={folder}", "model.vocab_size=300",
        f"data.chat_template={tmp_path / 'chat.jinja'}",
    )  # fmt: skip
    source = source_of(*typed)
    row = source.row(0)
    assert row.trained.any()
    assert not row.trained.all()
    with pytest.raises(RunError, match=r"rows.jsonl:31 .* -> data.bad_rows=skip"):
        [source.row(n) for n in range(35)]
    skipping = source_of(*typed, "data.bad_rows=skip")
    assert sum(skipping.read_row(n)[2] for n in range(35)) == 1


PAIRS = ("data.prompt=ask", "data.response=say")
KINDS = {
    "text": ("data.text=say",),
    "answers": PAIRS,
    "seq2seq": ("model=tiny_t5", "task=seq2seq_lm", "task.target_len=20", *PAIRS),
    "masked": ("model=tiny_bert", "task=masked_lm", "data.text=ask"),
    "pairs of texts": (
        "model=tiny_bert", "task=sequence_classification", "data.text=ask", "data.text_pair=say",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("option", "kind"), [*(("jsonl", kind) for kind in KINDS), ("csv", "pairs of texts")]
)
def test_stream_samples_match_prepared_rows(option, kind, tmp_path) -> None:
    made = [
        {"ask": f"why {n}? " * (n % 4 + 1), "say": f"so {n}", "label": n % 2} for n in range(30)
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", made)
    if option == "csv":
        import pandas

        pandas.DataFrame(made).to_csv(path := tmp_path / "rows.csv", index=False)
    typed = (f"data={option}", f"data.path={path}", "data.shuffle_buffer=0", *KINDS[kind])
    source = source_of(*typed)
    for n in range(25):
        read_now, prepared = source.row(n), source.first.row(n)
        assert read_now.tokens.tolist() == prepared.tokens.tolist()
        assert read_now.cut == prepared.cut
        assert source.label(n) == source.first.label(n)


def named(path, names):
    return write_jsonl(path, [{"text": f"row {n}", "label": name} for n, name in enumerate(names)])


CLASSES = ("model=tiny_bert", "task=sequence_classification")


def test_stream_class_names_come_from_the_first_rows(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rows, "NUM_PREVIEW_ROWS", 10)
    path = named(tmp_path / "rows.jsonl", ["yes", "no"] * 300 + ["maybe"] + ["no"] * 20)
    more = ("data.shuffle_buffer=0", "data.max_bad_frac=0.1")
    source = source_of(*CLASSES, f"data.path={path}", *more)
    assert [int(source.label(n)) for n in range(4)] == [0, 1, 0, 1]  # rows 5 to 8: no, yes, no, yes
    assert source.read_row(595)[2] == 1, "of no class"


@pytest.mark.parametrize(
    ("names", "words"),
    [(["a", "b"] * 20, "2 of 3 classes"), (["a"] * 40, "have the label a|1 of 3 classes")],
)
def test_unseen_classes_cannot_be_numbered(names, words, tmp_path) -> None:
    path = named(tmp_path / "rows.jsonl", names)
    with pytest.raises(ConfigError, match=words) as caught:
        source_of(*CLASSES, "task.num_labels=3", f"data.path={path}")
    assert caught.value.problems[0].fix.words == ("data.streaming=false",)


@pytest.mark.parametrize(
    ("problem", "labels", "expected"),
    [("multi_label", [[0, 2], []] * 20, [[], [0, 2]]), ("regression", [0.5, 2] * 20, [2, 0.5])],
)
def test_labels_of_each_problem_type(problem, labels, expected, tmp_path) -> None:
    number = 3 if problem == "multi_label" else 1
    path = named(tmp_path / "rows.jsonl", labels)
    more = (f"task.problem={problem}", f"task.num_labels={number}", f"data.path={path}")
    plan = planned(*CLASSES, *more, "data.shuffle_buffer=0")
    samples = open_split(plan, evaluation=False)
    for index, wanted in enumerate(expected):
        label = samples[0, index]["labels"]
        found = np.flatnonzero(label).tolist() if number == 3 else float(label)
        assert found == wanted


def test_too_few_rows_are_rejected(tmp_path) -> None:
    path = write(tmp_path / "rows.jsonl", 5)
    with pytest.raises(ConfigError, match="no usable row to train on"):
        source_of(f"data.path={path}")


def test_changed_files_are_not_trained_on(tmp_path) -> None:
    path = write(tmp_path / "rows.jsonl")
    source = source_of(f"data.path={path}")
    source.row(0)
    write(path, 31)
    with pytest.raises(ChangedError, match="have changed"):
        read(source, range(40))


def test_stream_is_another_run_than_prepared_rows(tmp_path) -> None:
    typed = (f"data.path={write(tmp_path / 'rows.jsonl')}",)
    ids = [
        planned(*typed, *more).run_id
        for more in (
            (), ("data.shuffle_buffer=5",), ("data.streaming=false",), ("data.num_samples=40",),
            ("data.num_samples=20",), ("data.num_eval_samples=4",),
        )
    ]  # fmt: skip
    assert len(set(ids)) == len(ids)
    cut = ("batch.per_device=1", "batch.accumulation=2")
    steps = {planned(*typed, *more).steps for more in ((), cut)}
    assert len(steps) == 1
