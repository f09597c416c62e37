"""The loss a run reports is the one plain transformers has with the model that the run saves."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from prepared import write_jsonl
from support import last_wins
from tokenizer_kinds import save_kind
from trained import record_of, train_job

import eke.data.sources.request as asking
from eke.data.preparation.rows import prepare_store
from eke.training.batches.tasks import open_split
from eke.training.loop.training_state import TrainingState
from eke.training.model.model_checks import HEADS

WIDTH = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 32, "max_position_embeddings": 64}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
WIDE = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "max_position_embeddings": 64}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1,
      "num_heads": 2}  # fmt: skip
PAD = {"pad_token": "<pad>"}

CLASSIFIERS: dict[str, tuple[str, dict[str, Any], str, dict[str, str]]] = {
    # name: model type, sizes, kind of tokenizer, more special tokens
    "bert": ("bert", WIDTH, "wordpiece with bos", {}),
    "llama": ("llama", WIDTH, "llama, space first", {}),
    "llama, own padding": ("llama", WIDTH, "llama, space first", PAD),
    "llama, writes its end": ("llama", WIDTH, "llama, eos", PAD),
    "gpt2": ("gpt2", GPT2, "bytes without", {}),
    "gpt_neox, own padding": ("gpt_neox", WIDTH, "bytes without", PAD),
    "glm, two in front": ("glm", {**WIDTH, "head_dim": 16, "num_key_value_heads": 1},
                          "two in front", PAD),
    "t5": ("t5", T5, "t5", {}),
    "bart": ("bart", WIDE, "bytes with a template", {}),
}  # fmt: skip
SEQ2SEQ = {
    "t5": ("t5", T5, "t5", {}),
    "bart": ("bart", WIDE, "bytes with a template", {}),
    "mbart": ("mbart", WIDE, "language behind", {}),
    "m2m_100": ("m2m_100", WIDE, "language in front", {}),
}
START = {"t5": "pad", "bart": "eos", "m2m_100": "eos"}
"""Which token the decoder starts with; mBART's class moves the target's last one."""
WORDS = ["the", "cat", "saw", "a", "small", "red", "bird", "and", "the", "dog", "liked", "it"]

pytestmark = pytest.mark.slow  # a minute of small trainings


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(asking, "_run_preparation", prepare_store)


def rows_of(task: str) -> list[dict[str, Any]]:
    """Of different lengths, all different."""
    texts = [f"{' '.join(WORDS[n % 5 : n % 5 + 3 + n % 6])} {n}" for n in range(36)]
    if task == "sequence_classification":
        return [{"text": text, "label": n % 2} for n, text in enumerate(texts)]
    if task == "seq2seq_lm":
        turned = [" ".join(reversed(text.split())) for text in texts]
        return [{"prompt": a, "response": b} for a, b in zip(texts, turned, strict=True)]
    return [{"text": text} for text in texts]


def save(folder: Path, kind: str, sizes: dict[str, Any], tokenizer: str, more: dict[str, str],
         task: str) -> None:  # fmt: skip
    """A checkpoint whose tokens all differ, with its tokenizer."""
    save_kind(folder, tokenizer)
    fast = transformers.AutoTokenizer.from_pretrained(folder)
    if more:
        fast.add_special_tokens(more)
        fast.save_pretrained(folder)
    ids = {f"{name}_token_id": getattr(fast, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    if kind in START and task == "seq2seq_lm":
        ids["decoder_start_token_id"] = ids[f"{START[kind]}_token_id"]
    elif kind == "t5":
        ids["decoder_start_token_id"] = ids["pad_token_id"]
    config = transformers.AutoConfig.for_model(kind, vocab_size=len(fast), **sizes, **ids)
    torch.manual_seed(0)
    model = getattr(transformers, HEADS[task]).from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)


def trained(make_plan, folder: Path, task: str, kind: str, sizes, tokenizer, more) -> TrainingState:
    """The job of a checkpoint after two steps."""
    save(folder / "mine", kind, sizes, tokenizer, more, task)
    rows = write_jsonl(folder / "rows.jsonl", rows_of(task))
    held_out = write_jsonl(folder / "held.jsonl", rows_of(task)[::3])
    columns = ("data.prompt=prompt", "data.response=response") if task == "seq2seq_lm" else ()
    plan = make_plan(*last_wins(
        "model=pretrained", f"model.name_or_path={folder / 'mine'}", f"task={task}", "data=jsonl",
        f"data.path={rows}", f"data.eval_path={held_out}", "data.seq_len=48", "train.steps=2",
        "batch.per_device=4", "batch.eval_per_device=4", "optimizer.lr=1e-3", "tracker=none",
        *columns,
    ))  # fmt: skip
    return train_job(plan, folder / "run")


def served(job: TrainingState) -> tuple[Any, Any]:
    """What anyone loads from the run's folder."""
    head = getattr(transformers, HEADS[job.plan.config.task.option])
    model = head.from_pretrained(job.paths.model, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(job.paths.model)


def held_out_rows(job: TrainingState) -> Iterator[tuple[dict[str, Any], Any]]:
    """Rows of the file, and what was prepared of each."""
    lines = (job.paths.folder.parent / "held.jsonl").read_text().splitlines()
    samples: Any = open_split(job.plan, evaluation=True)
    assert len(samples) == len(lines)
    for n, line in enumerate(lines):
        yield json.loads(line), samples[0, n]


def mean(losses: list[tuple[torch.Tensor, int]]) -> float:
    """Over all targets."""
    return sum(loss.item() * count for loss, count in losses) / sum(count for _, count in losses)


@torch.no_grad()
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_served_classifier_matches_evaluation(family, make_plan, tmp_path) -> None:
    with torch.enable_grad():
        job = trained(make_plan, tmp_path, "sequence_classification", *CLASSIFIERS[family])
    model, tokenizer = served(job)
    losses = []
    for row, prepared in held_out_rows(job):
        ids = tokenizer(row["text"])["input_ids"]
        assert prepared["input_ids"].tolist() == ids
        labels = torch.tensor([row["label"]])
        losses.append((model(input_ids=torch.tensor([ids]), labels=labels).loss, 1))
    assert record_of(job).loss.eval_final == pytest.approx(mean(losses), rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", SEQ2SEQ)
def test_served_target_matches_evaluation(family, make_plan, tmp_path) -> None:
    with torch.enable_grad():
        job = trained(make_plan, tmp_path, "seq2seq_lm", *SEQ2SEQ[family])
    model, tokenizer = served(job)
    losses = []
    for row, prepared in held_out_rows(job):
        source = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        labels = tokenizer(text_target=row["response"], return_tensors="pt")["input_ids"]
        assert prepared["input_ids"].tolist() == source[0].tolist()
        assert prepared["labels"].tolist() == labels[0].tolist()
        losses.append((model(input_ids=source, labels=labels).loss, labels.numel()))
    assert record_of(job).loss.eval_final == pytest.approx(mean(losses), rel=1e-5)


WINDOWS = {
    "llama": ("causal_lm", "llama", WIDTH, "llama, space first", {}),
    "electra": ("masked_lm", "electra", {**WIDTH, "embedding_size": 32}, "wordpiece without bos",
                {}),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("family", WINDOWS)
def test_prepared_tokens_have_the_same_loss(family, make_plan, tmp_path) -> None:
    task, *how = WINDOWS[family]
    with torch.enable_grad():
        job = trained(make_plan, tmp_path, task, *how)
    model, _ = served(job)
    losses = []
    for _, prepared in held_out_rows(job):
        ids = torch.from_numpy(prepared["input_ids"])[None]
        labels = torch.from_numpy(prepared["labels"])[None]
        if task == "causal_lm":
            assert labels[0, :-1].tolist() == ids[0, 1:].tolist()
            labels = ids  # transformers shifts them itself
        count = int((prepared["labels"] != -100).sum())
        losses.append((model(input_ids=ids, labels=labels).loss, count))
    assert record_of(job).loss.eval_final == pytest.approx(mean(losses), rel=1e-5)
