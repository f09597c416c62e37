"""Without the rules about data: what really goes wrong."""

import sys

import pyarrow
import pyarrow.parquet
import pytest
import torch
from checkpoints import LINES, make_tokenizer
from prepared import numbered, store_of, texts_of, write_jsonl
from tokenizer_kinds import save_kind
from unit.plan.cases import plan_of
from unit.training.model.plans import hand_plan

from eke.common.errors import ConfigError
from eke.common.text import IGNORED, NUM_SPECIAL_TOKENS
from eke.data.sources import packing
from eke.plan.planner.samples import DEFAULT_STEPS
from eke.training.batches.dataset import build_data
from eke.training.batches.sampler import StoredRows
from eke.training.batches.tasks import TaskSamples
from eke.training.model.build_model import build_model

CPU = torch.device("cpu")


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def rows(tmp_path) -> str:
    path = write_jsonl(tmp_path / "rows.jsonl", numbered(20, ask="why", say="so"))
    return f"data.path={path}"


def test_checkpoint_tokenizer_numbers_bytes_differently() -> None:
    """Byte b of a text is token b + 8 here; not one of these words is that to the tokenizer."""
    for line in LINES:
        numbers = make_tokenizer()(line)["input_ids"]
        ours = [byte + NUM_SPECIAL_TOKENS for byte in line.encode()]
        assert len(numbers) < len(ours)
        assert not set(ours[:1]) & set(numbers[:1])


def test_tables_require_the_datasets_package(rows, tmp_path, monkeypatch, own_cache) -> None:
    table = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b", "c"] * 9}), table)
    for package in ("datasets", "pyarrow.parquet"):  # the second comes with the first
        monkeypatch.setitem(sys.modules, package, None)
    assert store_of("data=jsonl", rows)
    with pytest.raises(ConfigError, match="pyarrow"):
        store_of("data=parquet", f"data.path={table}")


def test_packed_bidirectional_samples_attend_to_each_other() -> None:
    plan = hand_plan("model=tiny_bert", "task=masked_lm", "model.dropout=0")
    model = build_model(plan, CPU).eval()
    first, second = torch.arange(10, 18)[None], torch.arange(30, 38)[None]
    packed = torch.cat([first, second], dim=1)
    positions = torch.arange(8).repeat(2)[None]
    with torch.no_grad():
        alone = model(input_ids=second).logits
        together = model(input_ids=packed, position_ids=positions).logits[:, 8:]
    assert (alone - together).abs().max() > 1e-2


def test_second_text_is_ignored(rows, own_cache) -> None:
    store = store_of("data=jsonl", rows, "data.text_pair=say")
    assert not any("so" in text for text in texts_of(store, "train"))


def test_folder_numbers_are_not_regression_labels() -> None:
    """One output has one folder, and its number."""
    problem = ("task.problem=regression", "task.num_labels=1")
    data = build_data(hand_plan("task=sequence_classification", *problem))
    assert {float(data.train[0, index]["labels"]) for index in range(len(data.train))} == {0.0}


def test_classes_of_equal_name_are_merged(tmp_path, own_cache) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{n}", "label": n % 3} for n in range(60)])
    typed = ("task=sequence_classification", "task.num_labels=3", "task.labels=[a,a,b]")
    store = store_of("model=tiny_bert", "data=jsonl", f"data.path={path}", *typed)
    assert set(store.array("labels").tolist()) == {1, 2}


def test_prompt_column_without_response_is_trained_as_text(rows, own_cache) -> None:
    store = store_of("data=jsonl", rows, "data.prompt=ask")
    assert set(texts_of(store, "train")) == {"why"}


def test_translation_without_columns_has_no_target(rows, own_cache) -> None:
    with pytest.raises(IndexError):
        store_of("model=tiny_t5", "task=seq2seq_lm", "data=jsonl", rows)


@pytest.fixture
def conversations(tmp_path) -> tuple[str, ...]:
    """Twenty of them, with a tokenizer that has a chat template."""
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '[SEP]' }}{% endfor %}"
    folder = save_kind(tmp_path / "tokenizer", "wordpiece with bos", chat_template=template)
    question = {"role": "user", "content": "hello how are you today"}
    rows = [[question, {"role": "assistant", "content": f"fine {n}"}] for n in range(20)]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": row} for row in rows])
    return ("data=chat", f"data.path={path}", f"data.tokenizer={folder}")


def test_bytes_have_no_chat_template(conversations, own_cache) -> None:
    with pytest.raises(ConfigError, match="template"):
        store_of(*conversations, "data.tokenizer=bytes")


def test_masked_lm_predicts_prompt_tokens(conversations, own_cache, tmp_path) -> None:
    plan = hand_plan("model=tiny_bert", "task=masked_lm", "model.vocab_size=400", *conversations)
    store = store_of("model=tiny_bert", "task=masked_lm", *conversations)
    trained = store.array("trained")
    assert 0 < trained.sum() < len(trained)
    samples = TaskSamples(StoredRows(store, "train", None), plan.config, store.manifest.vocabulary)
    held = [samples.source.row(n).trained for n in range(len(samples))]
    labels = [samples[0, n]["labels"] for n in range(len(samples))]
    assert any(((label != IGNORED) & ~mask).any() for label, mask in zip(labels, held, strict=True))


def test_pairs_are_ignored_by_other_tasks(rows, own_cache) -> None:
    masked = ("model=tiny_bert", "task=masked_lm", "data=jsonl", rows)
    typed, plain = (
        store_of(*masked, *more) for more in (("data.prompt=ask", "data.response=say"), ())
    )
    assert typed.manifest.digest == plain.manifest.digest


def test_synthetic_lengths_are_independent(monkeypatch) -> None:
    """A million of them take seconds, a billion an hour."""
    drawn = []
    mix_seed = packing.mix_seed
    monkeypatch.setattr(packing, "mix_seed", lambda *parts: drawn.append(parts) or mix_seed(*parts))
    data = hand_plan("data=synthetic", "data.lengths=uniform").config.data
    packing.synthetic_lengths(data, data.seq_len, 0, 1000)
    assert len(drawn) == 1000


def test_stream_has_no_lengths(rows, own_cache) -> None:
    typed = ("data.streaming=true", "data.num_eval_samples=2", "data.length_grouping=true")
    plan = plan_of("data=jsonl", rows, *typed)
    with pytest.raises(AssertionError, match="not read in advance"):
        next(build_data(plan).train_steps(0))


def test_epoch_of_a_stream_is_the_run_length(rows, own_cache) -> None:
    """Each epoch would be as many steps as the run has by default, whatever the files hold."""
    typed = ("data=jsonl", rows, "data.streaming=true", "data.num_eval_samples=2")
    steps = plan_of(*typed, "train.epochs=2", "train.steps=null").steps
    assert steps.total == 2 * DEFAULT_STEPS
    assert steps.num_train_samples > 20
