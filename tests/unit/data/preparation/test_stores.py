"""What is prepared is what was in the rows: tokens, borders, labels, splits; once, and whole."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from chat_templates import FAMILIES as CHAT_FAMILIES
from chat_templates import saved
from prepared import BERT, GPT, numbered, save_bpe, store_of, texts_of, write_jsonl
from support import PATIENCE_S, environment
from unit.data.preparation.conftest import IN_ANOTHER_PROCESS
from unit.plan.cases import config_of, decision, plan_of

import eke.data.sources.request as asking
from eke.common import output
from eke.common.errors import ConfigError, RunError
from eke.common.text import BOS, EOS, IGNORED, SEP
from eke.data.sources import BYTES, open_store, read_manifest, request_of, store_folder
from eke.data.sources.source_files import find_files
from eke.training.batches.dataset import build_data, load_plan_tokenizer

ROWS = [
    {"text": f"row {n}", "label": "ab"[n % 2], "ask": f"q{n}", "say": f"a{n}"} for n in range(50)
]


@pytest.fixture
def rows_file(tmp_path):
    return write_jsonl(tmp_path / "a.jsonl", ROWS)


def all_texts(store):
    return texts_of(store, "train") + texts_of(store, "evaluation")


def test_every_format_gives_the_same_tokens(rows_file, tmp_path) -> None:
    lines = ["text,label,ask,say", *(",".join(row.values()) for row in ROWS)]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    stores = [
        store_of(f"data={option}", f"data.path={tmp_path / 'a'}.{option}", "data.seq_len=16")
        for option in ("jsonl", "csv", "parquet")
    ]
    assert sorted(all_texts(stores[0])) == sorted(row["text"] for row in ROWS)
    assert len({store.manifest.digest for store in stores}) == 1
    assert 1 <= len(texts_of(stores[0], "evaluation")) <= 15, "a tenth of 50, give or take"


def test_folder_includes_all_files_of_its_format(tmp_path) -> None:
    import gzip

    (tmp_path / "deep").mkdir()
    write_jsonl(tmp_path / "[1] a b.jsonl", ROWS[:20])
    write_jsonl(tmp_path / "deep" / "é.jsonl", ROWS[20:30])
    (tmp_path / "c.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS[30:]).encode())
    )
    (tmp_path / "notes.txt").write_text("no rows")
    for typed in (f"data.path='{tmp_path}'", f"data.path='{tmp_path}/**/*jsonl*'"):
        store = store_of("data=jsonl", typed, "data.seq_len=16")
        assert sorted(all_texts(store)) == sorted(row["text"] for row in ROWS)


def test_evaluation_may_have_its_own_files(rows_file, tmp_path) -> None:
    other = write_jsonl(tmp_path / "b.jsonl", numbered(7))
    store = store_of("data=jsonl", f"data.path={rows_file}", f"data.eval_path={other}")
    assert len(texts_of(store, "train")) == 50
    assert texts_of(store, "evaluation") == [row["text"] for row in numbered(7)]


def test_split_depends_on_content(rows_file, tmp_path) -> None:
    """Added rows move no other row, and equal rows fall to one side."""
    before = texts_of(store_of("data=jsonl", f"data.path={rows_file}"), "evaluation")
    longer = write_jsonl(tmp_path / "longer.jsonl", [*numbered(30), *ROWS, *ROWS])
    store = store_of("data=jsonl", f"data.path={longer}")
    after = texts_of(store, "evaluation")
    assert set(before) <= set(after)
    assert not set(after) & set(texts_of(store, "train"))


@pytest.mark.parametrize(
    ("texts", "parts"),
    [(["same"] * 2, [["same"]] * 2), (["one", "two"] * 3, [["one"] * 3, ["two"] * 3])],
    ids=["two rows are one each", "a row that crosses takes its equals along"],
)
def test_both_splits_have_rows(texts, parts, tmp_path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    store = store_of("data=jsonl", f"data.path={file}", "data.eval_frac=0.001")
    assert sorted(texts_of(store, split) for split in ("train", "evaluation")) == parts


def rows_of(store):
    tokens, offsets = store.array("tokens"), store.array("offsets")
    return [tokens[a:b].tolist() for a, b in pairwise(offsets)]


FRAMES = {
    "llama": ((), [BOS], [EOS]),
    "bert": (("model=tiny_bert", "task=masked_lm"), [BOS], [SEP]),
    "t5": (("model=tiny_t5", "task=sequence_classification"), [BOS], [EOS]),
    "gpt2-classifier": (("model=tiny_gpt2", "task=sequence_classification"), [BOS], [EOS]),
}


@pytest.mark.parametrize(("task", "first", "last"), FRAMES.values(), ids=FRAMES)
def test_byte_sequences_begin_and_end_as_the_family_requires(task, first, last, rows_file) -> None:
    store = store_of("data=jsonl", f"data.path={rows_file}", "data.seq_len=32", *task)
    coded = [[*first, *(b + 8 for b in row["text"].encode()), *last] for row in ROWS]
    assert rows_of(store) == coded


def test_eos_replaces_a_missing_padding_token(rows_file, tmp_path) -> None:
    folder = save_bpe(tmp_path / "tokenizer", GPT)
    store = store_of("data=jsonl", f"data.path={rows_file}", f"data.tokenizer={folder}")
    vocabulary = store.manifest.vocabulary
    assert vocabulary.pad_is_eos
    assert vocabulary.pad == vocabulary.eos < vocabulary.size


def test_long_rows_are_truncated_and_counted(tmp_path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * n} for n in range(1, 41)])
    store = store_of("data=jsonl", f"data.path={file}", "data.seq_len=12")
    assert store.manifest.num_truncated == 30
    lengths = Counter(len(row) for row in rows_of(store))
    assert lengths == {**{n: 1 for n in range(3, 12)}, 12: 31}
    assert all(row[0] == BOS for row in rows_of(store))
    assert Counter(row[-1] == EOS for row in rows_of(store)) == {True: 10, False: 30}


def test_prompt_is_not_trained(rows_file) -> None:
    typed = ("data=jsonl", f"data.path={rows_file}", "data.prompt=ask", "data.response=say")
    plan = plan_of(*typed, "data.seq_len=16", "train.steps=1")
    data = build_data(plan)
    seen = []
    for number in range(len(data.train)):
        sample = data.train[0, number]
        ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        start = next(n for n, label in enumerate(labels) if label != IGNORED)
        assert labels[start:-1] == ids[start + 1 :]
        assert labels[-1] == IGNORED
        prompt = bytes(t - 8 for t in ids[1 : start + 1]).decode()
        assert prompt[-1] == "\n"
        prompt = prompt[:-1]
        answer = bytes(t - 8 for t in labels[start:-2]).decode()
        assert labels[-2] == EOS
        assert (prompt[0], answer[0], prompt[1:]) == ("q", "a", answer[1:])
        seen.append(prompt)
    assert len(set(seen)) == len(seen) == plan.steps.num_train_samples


def test_long_pairs_keep_prompt_end_and_response_start(tmp_path) -> None:
    cases = [
        ("abc", "def", "abc\n", "def"),
        ("abcdefghijkl", "xy", "fghijkl\n", "xy"),
        ("ab", "klmnopqrstuvw", "ab\n", "klmnopqr"),
        ("abcdefghijkl", "klmnopqrstuv", "ijkl\n", "klmnop"),
    ]
    rows = [{"ask": ask, "say": say} for ask, say, *_ in cases]
    store = store_of("data=jsonl", f"data.path={write_jsonl(tmp_path / 'a.jsonl', rows)}",
                     "data.seq_len=12", "data.prompt=ask", "data.response=say")  # fmt: skip
    found = []
    for row, cut in zip(rows_of(store), store.array("cuts"), strict=True):
        ends = row[-1] == EOS
        parts = row[1:cut], row[cut : -1 if ends else None]
        found.append((*(bytes(t - 8 for t in part).decode() for part in parts), ends))
    assert found == [(*kept, kept[1] == say) for _, say, *kept in cases]
    assert store.manifest.num_truncated == 3


def test_text_labels_are_numbered_in_sorted_order(rows_file) -> None:
    typed = ("data=jsonl", f"data.path={rows_file}", "model=tiny_bert",
             "task=sequence_classification", "train.steps=1")  # fmt: skip
    plan = plan_of(*typed)
    assert decision(plan, "data.label") == ("a=0 b=1", "as named in the rows: a, b")
    data = build_data(plan)
    for number in range(len(data.train)):
        sample = data.train[0, number]
        row = int(bytes(t - 8 for t in sample["input_ids"][1:-1].tolist()).decode()[4:])
        assert sample["labels"].item() == row % 2


def test_masking_excludes_special_tokens(rows_file, tmp_path) -> None:
    folder = save_bpe(tmp_path / "tokenizer", BERT)
    plan = plan_of("data=jsonl", f"data.path={rows_file}", f"data.tokenizer={folder}",
                   "model=tiny_bert", "task=masked_lm", "task.mask_frac=0.9",
                   "train.steps=1")  # fmt: skip
    data, special = build_data(plan), set(plan.vocabulary.special)
    for number in range(len(data.train)):
        sample = data.train[0, number]
        labels = set(sample["labels"].tolist()) - {IGNORED}
        assert labels
        assert not labels & special
        assert sample["input_ids"].max() < plan.vocabulary.size


def test_packed_rows_hold_every_sample_once(tmp_path) -> None:
    rng = np.random.default_rng(0)
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * n} for n in rng.integers(1, 30, 300)])
    typed = ("data=jsonl", f"data.path={file}", "data.seq_len=32", "train.steps=1")
    packed, alone = plan_of(*typed, "data.packing=on"), plan_of(*typed)
    assert packed.steps.num_train_samples < 0.75 * alone.steps.num_train_samples
    data, single = build_data(packed), build_data(alone)
    assert len(data.train) == packed.steps.num_train_samples
    found: Counter[int] = Counter()
    for number in range(len(data.train)):
        sample = data.train[0, number]
        positions = sample["position_ids"]
        assert len(positions) <= 32
        starts = [*(positions == 0).nonzero()[0].tolist(), len(positions)]
        found.update(b - a for a, b in pairwise(starts))
        assert (sample["labels"] == IGNORED).sum() == len(starts) - 1
    lengths = Counter(len(single.train[0, n]["input_ids"]) for n in range(len(single.train)))
    assert found == lengths


def test_tokenized_text_joins_its_documents(tmp_path) -> None:
    from transformers import AutoTokenizer

    folder = save_bpe(tmp_path / "tokenizer", GPT)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number:02}.txt").write_text(f"öne two {number} three é" * 30)
    typed = ("data=text", f"data.path={texts}", f"data.tokenizer={folder}", "data.seq_len=16",
             "data.eval_frac=0.5", "train.steps=1")  # fmt: skip
    plan = plan_of(*typed)
    data = build_data(plan)
    assert len(data.train) == plan.steps.num_train_samples
    assert not data.bytes_are_tokens
    ids = [t for n in range(len(data.train)) for t in data.train[0, n]["input_ids"].tolist()]
    documents = tokenizer.decode(ids).split("<|endoftext|>")
    originals = [path.read_text() for path in sorted(texts.iterdir())]
    assert len(documents) >= 5
    assert all(text in originals for text in documents[:-1])


def test_single_file_is_split_between_characters(tmp_path) -> None:
    folder = save_bpe(tmp_path / "tokenizer", GPT)
    file = tmp_path / "a.txt"
    for size in range(100, 106):
        file.write_text("é€𝄞" * size)
        plan = plan_of("data=text", f"data.path={file}", f"data.tokenizer={folder}",
                       "data.seq_len=16", "batch.per_device=1", "train.steps=1")  # fmt: skip
        assert decision(plan, "data.path") is None, "a character was torn"


def test_run_id_depends_on_file_content_only(rows_file, tmp_path) -> None:
    folder = save_bpe(tmp_path / "tokenizer", GPT)
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        shutil.copy(rows_file, tmp_path / place / "a.jsonl")
        shutil.copytree(folder, tmp_path / place / "tokenizer")
    typed = ("data=jsonl", "train.steps=1")

    def plan(place):
        return plan_of(*typed, f"data.path={tmp_path / place / 'a.jsonl'}",
                       f"data.tokenizer={tmp_path / place / 'tokenizer'}")  # fmt: skip

    one, two = plan("one"), plan("two")
    assert (one.run_id, one.store) == (two.run_id, two.store)
    assert plan_of(*one.overrides, "optimizer=sgd").store == one.store
    with open(tmp_path / "two" / "a.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    assert plan("two").run_id != one.run_id


@pytest.mark.slow
def test_emptied_cache_is_refilled_by_the_worker_for_unchanged_data(
    rows_file, own_cache, monkeypatch
) -> None:
    plan = plan_of("data=jsonl", f"data.path={rows_file}", "train.steps=1")
    before = build_data(plan).train[0, 3]["input_ids"].tolist()
    monkeypatch.setattr(asking, "_run_preparation", IN_ANOTHER_PROCESS)
    shutil.rmtree(own_cache)
    assert build_data(plan).train[0, 3]["input_ids"].tolist() == before
    shutil.rmtree(own_cache)
    with open(rows_file, "a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(RunError, match="the same command again"):
        build_data(plan)


def test_damaged_store_is_rebuilt(rows_file) -> None:
    typed = ("data=jsonl", f"data.path={rows_file}")
    store = store_of(*typed)
    damage = {
        "manifest.json": os.unlink, "tokens.bin": os.unlink,
        "offsets.bin": lambda path: os.truncate(path, 8),
    }  # fmt: skip
    for name, harm in damage.items():
        harm(store.folder / name)
        assert read_manifest(store.folder) is None, name
        again = store_of(*typed)
        assert again.manifest == store.manifest
        assert len(all_texts(again)) == 50


def start(request, tmp_path, name="request"):
    """`python -m eke.data.preparation`; its output goes into a file."""
    asked = tmp_path / f"{name}.json"
    asked.write_text(request.to_json())
    with open(tmp_path / f"{name}.out", "w") as out, open(asked) as given:
        return subprocess.Popen(
            [sys.executable, "-m", "eke.data.preparation"],
            env=environment(tmp_path), stdin=given, stdout=out, stderr=subprocess.DEVNULL,
        )  # fmt: skip


@pytest.mark.slow
def test_concurrent_processes_build_one_store(rows_file, tmp_path) -> None:
    request = request_of(config_of("data=jsonl", f"data.path={rows_file}"))
    children = [start(request, tmp_path, f"request{n}") for n in range(2)]
    assert [child.wait() for child in children] == [0, 0]
    outs = [(tmp_path / f"request{n}.out").read_text() for n in range(2)]
    folders = {json.loads(out.splitlines()[-1])["folder"] for out in outs}
    assert folders == {str(store_folder(request.key))}
    visible = [p.name for p in store_folder(request.key).parent.iterdir() if p.suffix != ".lock"]
    assert visible == [request.key]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=str)
def test_killed_preparation_leaves_no_complete_store(number, tmp_path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "row"}\n' * 400_000)
    request = request_of(config_of("data=jsonl", f"data.path={file}"))
    child = start(request, tmp_path)
    folder = store_folder(request.key)
    deadline = time.monotonic() + PATIENCE_S
    while not list(folder.parent.glob(f".{folder.name}.*.tmp/tokens.bin")):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(number)
    assert child.wait() != 0
    assert not folder.exists()
    unfinished = list(folder.parent.glob("*.tmp"))
    assert bool(unfinished) == (number == signal.SIGKILL), "only a kill leaves files"
    write_jsonl(file, numbered(60))
    store_of("data=jsonl", f"data.path={file}")


@pytest.mark.parametrize("heard", [True, False], ids=["heard", "nobody listens"])
def test_slow_preparation_is_reported_and_gets_its_full_request(
    heard, rows_file, in_another_process, monkeypatch
) -> None:
    """Nobody listens to `eke plan ... |& head` after a while."""
    monkeypatch.setattr("eke.data.sources.request._PROGRESS_DELAY_S", 0.0)
    request = request_of(config_of("data=jsonl", f"data.path={rows_file}", "data.seq_len=32"))
    reader, writer = os.pipe()
    raw = output._Output(writer, "wb")  # as every command's standard error
    with open(reader) as listener, io.TextIOWrapper(raw, write_through=True) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        if not heard:
            listener.close()
        assert open_store(request).manifest.num_rows == 50
        if heard:
            assert listener.readline().startswith("preparing data=jsonl ")


def test_next_preparation_removes_unfinished_files(rows_file) -> None:
    request = request_of(config_of("data=jsonl", f"data.path={rows_file}"))
    folder = store_folder(request.key)
    left = folder.parent / f".{folder.name}.99999.tmp"
    left.mkdir(parents=True)
    (left / "tokens.bin").write_bytes(b"half")
    store_of("data=jsonl", f"data.path={rows_file}")
    assert not left.exists()
    assert folder.is_dir()


@pytest.mark.parametrize(("option", "hub"), [("chat", "chat_hub"), ("jsonl", "hub")])
def test_hub_name_as_a_path_is_answered_with_the_hub_option(option, hub) -> None:
    with pytest.raises(ConfigError) as caught:
        find_files(option, "data.path", "owner/name", None)
    assert str(caught.value.problems[0].fix) == f"data={hub} data.name=owner/name"


@pytest.fixture
def hub_folder(tmp_path):
    """A local copy in the hub's layout: two configurations, two splits."""
    root = tmp_path / "rows-of-mine"
    for name, count in (("small", 30), ("large", 60)):
        (root / name).mkdir(parents=True)
        write_jsonl(root / name / "train.jsonl", numbered(count))
        write_jsonl(root / name / "test.jsonl", numbered(9))
    (root / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {name}\n  data_files:\n"
            f"  - split: train\n    path: {name}/train.jsonl\n"
            f"  - split: test\n    path: {name}/test.jsonl\n"
            for name in ("small", "large")
        )
        + "---\n"
    )
    return root


@pytest.fixture
def hub_cache(tmp_path, monkeypatch, hub_folder, in_another_process):
    """The same as `hf download --repo-type dataset owner/rows` leaves it, without a connection.

    Where it is, huggingface_hub reads when it is imported: by a process of its own.
    """
    repo = tmp_path / "hf" / "hub" / "datasets--owner--rows"
    shutil.copytree(hub_folder, repo / "snapshots" / ("0" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return repo


@pytest.mark.slow
@pytest.mark.parametrize("streaming", ["false", "true"])
def test_hub_dataset_is_read_by_name(streaming, hub_cache) -> None:
    """By a folder: the next test."""
    typed = ("data=hub", "data.name=owner/rows", "data.config_name=large", "data.eval_split=test",
             "data.num_samples=40", f"data.streaming={streaming}")  # fmt: skip
    plan = plan_of(*typed, "data.seq_len=24", "train.steps=1")
    assert (plan.steps.num_train_samples, plan.steps.num_eval_samples) == (40, 9)
    assert decision(plan, "data rows")[1].startswith("of 69 read")
    assert len(build_data(plan).train) == 40


def test_hub_dataset_without_evaluation_split_is_split(hub_folder, hub_cache) -> None:
    typed = ("data=hub", f"data.name={hub_folder}", "data.config_name=small")
    store = store_of(*typed)
    assert len(texts_of(store, "train")) + len(texts_of(store, "evaluation")) == 30
    streamed = store_of(*typed, "data.streaming=true", "data.num_eval_samples=5")
    assert (len(texts_of(streamed, "evaluation")), len(texts_of(streamed, "train"))) == (5, 25)


@pytest.mark.parametrize(
    ("typed", "path", "words", "fix"),
    [
        ((), "data.config_name", "small, large", "data.config_name=small"),
        (("data.config_name=smalls",), "data.config_name", "small, large",
         "data.config_name=small"),
        (("data.config_name=small", "data.split=trains"), "data.split",
         "train, test", "data.split=train"),
        (("data.config_name=small", "data.text=txt"), "data.text", "Columns: text",
         "data.text=text"),
    ],
    ids=["no configuration", "wrong configuration", "wrong split", "wrong column"],
)  # fmt: skip
def test_unknown_part_of_a_hub_data_set_is_rejected(
    typed, path, words, fix, hub_folder, hub_cache
) -> None:
    with pytest.raises(ConfigError) as caught:
        store_of("data=hub", f"data.name={hub_folder}", *typed)
    (problem,) = caught.value.problems
    assert (problem.key, str(problem.fix)) == (path, fix)
    assert words in problem.why


@pytest.mark.slow
@pytest.mark.parametrize("name", ["owner/absent", "absent", "/nowhere/at/all"])
def test_missing_connection_is_answered_with_a_download_command(name, hub_cache) -> None:
    with pytest.raises(ConfigError) as caught:
        store_of("data=hub", f"data.name={name}")
    (problem,) = caught.value.problems
    assert problem.key == "data.name"
    assert problem.fix.words[0] == "data=jsonl"
    if name == "owner/absent":
        assert "hf download " in problem.fix.remark


def test_tokenizer_is_available_for_saving(rows_file, tmp_path) -> None:
    folder = save_bpe(tmp_path / "tokenizer", GPT)
    typed = ("data=jsonl", f"data.path={rows_file}", "train.steps=1")
    tokenizer = load_plan_tokenizer(plan_of(*typed, f"data.tokenizer={folder}"))
    assert tokenizer.pad_token == "<|endoftext|>"
    assert load_plan_tokenizer(plan_of(*typed, f"data.tokenizer={BYTES}")) is None


@pytest.mark.parametrize("typed", [False, True], ids=["its own template", "another template"])
def test_saved_chat_template_is_the_trained_one(typed, tmp_path) -> None:
    own = saved(CHAT_FAMILIES["chatml"], tmp_path / "tok").chat_template
    template = tmp_path / "other.jinja"
    template.write_text("{{ 'talk ' }}" + own)
    messages = [{"role": "user", "content": "so?"}, {"role": "assistant", "content": "so."}]
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": messages}] * 20)
    more = [f"data.chat_template={template}"] if typed else []
    data = (
        f"data.path={tmp_path}/chats.jsonl",
        f"data.tokenizer={tmp_path}/tok",
        "model.vocab_size=330",
    )
    plan = plan_of("data=chat", *data, *more, "train.steps=1")
    template.unlink()  # once the rows are prepared
    assert load_plan_tokenizer(plan).chat_template == ("{{ 'talk ' }}" if typed else "") + own
