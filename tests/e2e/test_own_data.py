"""`python train.py` on rows of one's own: every task trains, and the record says what was read."""

import json

import pytest
from live import record_of, run_folders
from prepared import BERT, GPT, T5, save_bpe, write_jsonl
from support import TINY

from eke.data.preparation.rows import prepare_store
from eke.data.sources import request

SHORT = (*TINY, "hardware=cpu", "train.steps=6", "batch.per_device=4", "data.seq_len=24",
         "train.log_every=1", "model.vocab_size=512")  # fmt: skip

ROWS = [
    {"text": f"row {n} has {'some ' * (n % 7)}words", "ask": f"what is {n}", "say": f"it is {n}",
     "label": ("spam", "ham")[n % 2]}
    for n in range(80)
]  # fmt: skip

TASKS = {
    "causal": ("model=tiny", None),
    "prompts": ("model=tiny_gpt2", GPT, "data.prompt=ask", "data.response=say"),
    "masked": ("model=tiny_bert", BERT, "task=masked_lm"),
    "bert-classes": ("model=tiny_bert", None, "task=sequence_classification"),
    "llama-classes": ("model=tiny", GPT, "task=sequence_classification"),
    "gpt2-classes": ("model=tiny_gpt2", None, "task=sequence_classification"),
    "t5-classes": ("model=tiny_t5", None, "task=sequence_classification"),
    "seq2seq": ("model=tiny_t5", T5, "task=seq2seq_lm", "data.prompt=ask", "data.response=say"),
}
"""Model, special tokens of its tokenizer (None: bytes), and the rest."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Rows are prepared in this process; a separate process takes seconds to start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(request, "_run_preparation", prepare_store)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_padding_does_not_change_any_task(task, curve_of, tmp_path_factory) -> None:
    """Ragged rows, padded to the longest of four or of one: padding changes nothing."""
    from equivalence_compare import largest_difference

    folder = tmp_path_factory.mktemp("data")
    file = write_jsonl(folder / "a.jsonl", ROWS)
    model, special, *more = task
    if special:
        tokenizer = save_bpe(folder / "tokenizer", special, ends_texts=special is T5)
        more.append(f"data.tokenizer={tokenizer}")
    typed = (*SHORT, model, "data=jsonl", f"data.path={file}", *more, "data.num_eval_samples=4")
    whole = curve_of(*typed)
    cut = curve_of(*typed, "batch.per_device=1", "batch.accumulation=4")
    assert largest_difference(whole, cut) < 1e-5
    longer = curve_of(*typed, "data.pad_to_multiple_of=16")
    assert largest_difference(whole, longer) < 1e-5


@pytest.mark.slow
def test_record_describes_the_data(train_forked, tmp_path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [*ROWS, {"text": 5}])
    typed = (*SHORT, "model=tiny_bert", "task=sequence_classification", "data=jsonl",
             f"data.path={file}", "data.max_bad_frac=0.1")  # fmt: skip
    done = train_forked(*typed)
    assert done.code == 0, done.text
    shown = " ".join(done.err.split())
    assert "1 bad, 0 empty (excluded)" in shown
    assert "first: a.jsonl:81 text is the number 5, not text" in shown
    (folder,) = run_folders(tmp_path)
    record = record_of(folder)
    said = {d["key"]: d["value"] for d in record["plan"]["decisions"]}
    assert said["data rows"] == "80"
    assert said["data.label"] == "ham=0 spam=1"
    assert json.loads((folder / "plan.json").read_text())["store"]
    saved = json.loads((folder / "model" / "config.json").read_text())
    assert saved["id2label"] == {"0": "ham", "1": "spam"}
    again = train_forked(*typed)
    assert "(recorded " in again.out
