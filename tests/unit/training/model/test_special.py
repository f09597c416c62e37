"""An end of text that pads is learnt, and what decides so is in the identity of the data."""

from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import save_checkpoint
from prepared import store_of, write_jsonl
from support import TINY, last_wins
from tokenizer_kinds import save_kind
from tokenizers import processors
from unit.training.model.plans import hand_plan

from eke.config.compose import compose
from eke.data.sources import SpecialTokens, Vocabulary
from eke.plan.planner import Plan
from eke.training.model.build_model import build_model
from eke.training.model.load_pretrained import is_padding_alone
from eke.training.model.save_model import save_pretrained
from eke.workflows.planning import plan_for

pytestmark = pytest.mark.usefixtures("own_cache")
CPU = torch.device("cpu")
SHORT = ("data.seq_len=16", "batch.per_device=4", "train.steps=1", "hardware=cpu", "tracker=none")


def rows_of(folder: Path, tokenizer: Path, labels: bool = False) -> tuple[str, ...]:
    rows = [{"text": f"the cat saw bird {n}", **({"label": n % 2} if labels else {})}
            for n in range(24)]  # fmt: skip
    return (
        "data=jsonl",
        f"data.path={write_jsonl(folder / 'a.jsonl', rows)}",
        (f"data.tokenizer={tokenizer}"),
    )


def plan_of(*typed: str) -> Plan:
    return plan_for(compose(last_wins(*SHORT, *typed)), planning=True)


def gradient_of(model: torch.nn.Module, token: int) -> float:
    """Largest element of the gradient of a token's embedding, in a batch that begins with it."""
    model.zero_grad()
    model(input_ids=torch.tensor([[token, 9, 10, token]])).logits.square().mean().backward()
    return model.get_input_embeddings().weight.grad[token].abs().max().item()


@pytest.fixture
def end_pads(tmp_path):
    """Folder and id of a tokenizer that begins, ends and pads with the same token."""
    folder = save_kind(tmp_path / "tokenizer", "bytes without")
    return folder, transformers.AutoTokenizer.from_pretrained(folder).eos_token_id


@pytest.mark.parametrize("task", ["causal_lm", "sequence_classification"])
def test_padding_used_as_eos_is_trained(task, tmp_path, end_pads) -> None:
    tokenizer, end = end_pads
    ids = {"pad_token_id": end, "eos_token_id": end, "bos_token_id": end}
    folder = save_checkpoint(tmp_path / "model", "llama", task=task, vocab_size=340, **ids)
    rows = rows_of(tmp_path, tokenizer, labels=task != "causal_lm")
    plan = plan_of("model=pretrained", f"model.name_or_path={folder}", f"task={task}", *rows)
    assert plan.vocabulary.pad_is_eos
    model = build_model(plan, CPU)
    plain = type(model).from_pretrained(folder).eval()
    if task == "causal_lm":
        assert gradient_of(model, end) > 0
        assert gradient_of(plain, end) == 0, "plain transformers never learns it"
    assert model.get_input_embeddings().padding_idx is None
    assert torch.equal(model.get_input_embeddings().weight, plain.get_input_embeddings().weight)
    save_pretrained(model, tmp_path / "saved")
    saved = transformers.AutoConfig.from_pretrained(tmp_path / "saved")
    assert {key: getattr(saved, key) for key in ids} == ids


@pytest.mark.parametrize("task", ["causal_lm", "sequence_classification"])
@pytest.mark.parametrize("family", ["tiny", "tiny_gpt2"])
def test_random_model_with_padding_as_eos_learns_eos(family, task, tmp_path, end_pads) -> None:
    tokenizer, end = end_pads
    rows = rows_of(tmp_path, tokenizer, labels=task != "causal_lm")
    sizes = (*TINY, f"model={family}", "model.vocab_size=340", f"task={task}")
    model = build_model(plan_of(*sizes, *rows), CPU)
    table = model.get_input_embeddings()
    assert table.weight[end].abs().max() > 0, "drawn as any other token"
    assert table.padding_idx is None
    assert model.config.eos_token_id == end
    if task == "causal_lm":
        assert gradient_of(model, end) > 0
    else:
        assert model.config.pad_token_id == end, "for pooling"


def test_padding_with_its_own_id_is_not_trained(tmp_path) -> None:
    tokenizer = save_kind(tmp_path / "tokenizer", "bytes with a template")
    sizes = (*TINY, "model=tiny", "model.vocab_size=340")
    plan = plan_of(*sizes, *rows_of(tmp_path, tokenizer))
    model = build_model(plan, CPU)
    pad = plan.vocabulary.pad
    assert not plan.vocabulary.pad_is_eos
    assert model.model.embed_tokens.padding_idx == pad
    assert gradient_of(model, pad) == 0
    assert gradient_of(model, plan.vocabulary.eos) > 0


@pytest.mark.parametrize(
    ("changes", "alone"),
    [
        ({}, True),
        ({"eos": 7}, False),
        ({"bos": 7}, False),
        ({"frame": SpecialTokens((7,), ())}, False),
        ({"target_frame": SpecialTokens((), (7,))}, False),
    ],
    ids=["alone", "end of text", "beginning", "in front", "behind a target"],
)
def test_padding_id_in_other_positions_is_found(changes, alone) -> None:
    vocabulary = Vocabulary(**{"tokenizer": "x", "pad": 7, "bos": 1, "eos": 2, **changes})
    assert is_padding_alone(vocabulary, 7) is alone
    assert not is_padding_alone(vocabulary, 3), "no padding at all"


def test_bytes_are_unchanged() -> None:
    model = build_model(hand_plan("model=tiny", "data=synthetic"), CPU)
    assert model.model.embed_tokens.padding_idx == model.config.pad_token_id == 0


def with_end(tokenizer) -> None:
    """Have a tokenizer write an end of text, which rows of causal_lm have anyway."""
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        special_tokens=[(begin, tokenizer.bos_token_id), (end, tokenizer.eos_token_id)],
    )


CHANGES = {
    "frame": ("llama, space always", with_end),
    "padding": ("llama, eos", lambda t: t.add_special_tokens({"pad_token": "<unk>"})),
    "another padding": ("t5", lambda t: t.add_special_tokens({"pad_token": "<unk>"})),
    "end of text as padding": ("t5", lambda t: t.add_special_tokens({"pad_token": "</s>"})),
}
"""What is changed of a tokenizer, whose kind it is, and how; rows of causal_lm stay the same."""


@pytest.mark.parametrize("change", CHANGES)
def test_data_fingerprint_covers_special_tokens(change, tmp_path) -> None:
    kind, apply = CHANGES[change]
    before = save_kind(tmp_path / "before", kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(before)
    apply(tokenizer)
    tokenizer.save_pretrained(tmp_path / "after")
    stores = [
        store_of(*rows_of(tmp_path, folder), "data.seq_len=64")
        for folder in (before, tmp_path / "after")
    ]
    one, other = (store.manifest for store in stores)
    assert len({tuple(store.array("tokens").tolist()) for store in stores}) == 1
    assert one.vocabulary != other.vocabulary
    assert one.digest != other.digest
