"""The decoder reads what the model's own class makes of the labels, in every family."""

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from unit.training.model.plans import hand_plan

from eke.common.errors import RunError
from eke.config.schema import PretrainedModel
from eke.plan.planner import Plan
from eke.training.model.loss import build_shift

WIDE = {
    "vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16, "max_position_embeddings": 32, "dropout": 0.0, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1,
    "num_decoder_layers": 1, "num_heads": 2, "dropout_rate": 0.0, "pad_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
SCALED = {**WIDE, "scale_embedding": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("bart", {**WIDE, "decoder_start_token_id": 2}),
    "bart, another start": ("bart", {**WIDE, "decoder_start_token_id": 7}),
    "mbart": ("mbart", WIDE),
    "plbart": ("plbart", WIDE),
    "m2m_100": ("m2m_100", {**WIDE, "decoder_start_token_id": 2}),
    "marian": ("marian", {**SCALED, "pad_token_id": 59, "decoder_start_token_id": 59}),
    "pegasus": ("pegasus", {**SCALED, "pad_token_id": 0, "decoder_start_token_id": 0}),
    "blenderbot": ("blenderbot", {**WIDE, "decoder_start_token_id": 0}),
    "t5": ("t5", {**T5, "decoder_start_token_id": 0}),
    "t5, another start": ("t5", {**T5, "decoder_start_token_id": 5}),
    "umt5": ("umt5", {**T5, "decoder_start_token_id": 0}),
}
"""Name -> transformers' model type and the sizes of a tiny one."""

SOURCE = torch.tensor([[9, 10, 11, 12, 2], [13, 14, 2, 15, 16]])
LABELS = torch.tensor([[20, 21, 22, 2, 30], [23, 2, 31, -100, -100]])
"""The last token of each target stands for a language code; the second row is filled up."""


def planned(folder) -> Plan:
    """A plan that trains the checkpoint in a folder."""
    plan = hand_plan("model=tiny_t5", "task=seq2seq_lm", "data=synthetic")
    model = PretrainedModel(name_or_path=str(folder), family="other")
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, model=model))


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_inputs_match_transformers(family, tmp_path) -> None:
    kind, sizes = FAMILIES[family]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # no token like another
    shift = build_shift(planned(tmp_path))
    assert shift is not None
    given = LABELS.clone()
    inputs = shift(given)
    assert torch.equal(given, LABELS), "the labels are still needed"
    assert inputs.shape == LABELS.shape
    with torch.no_grad():
        right = model(input_ids=SOURCE, labels=LABELS.clone()).loss
        logits = model(input_ids=SOURCE, decoder_input_ids=inputs).logits
        other = model(input_ids=SOURCE, decoder_input_ids=inputs.roll(1, 1)).logits
    targets = LABELS.flatten()
    assert cross_entropy(logits.flatten(0, 1), targets).item() == pytest.approx(right.item(), 1e-5)
    wrong = cross_entropy(other.flatten(0, 1), targets).item()
    assert wrong != pytest.approx(right.item(), 1e-3), "other inputs would show"


def test_mbart_decoder_starts_with_the_target_language(tmp_path) -> None:
    transformers.MBartConfig(**WIDE).save_pretrained(tmp_path)
    shift = build_shift(planned(tmp_path))
    assert shift is not None
    assert shift(LABELS).tolist() == [[30, 20, 21, 22, 2], [31, 23, 2, 31, 1]]


def test_decoder_inputs_without_checkpoint_start_with_padding() -> None:
    shift = build_shift(hand_plan("model=tiny_t5", "task=seq2seq_lm", "data=synthetic"))
    assert shift is not None
    assert shift(LABELS).tolist() == [[0, 20, 21, 22, 2], [0, 23, 2, 31, 0]]


@pytest.mark.parametrize("task", ["causal_lm", "sequence_classification"])
def test_other_tasks_have_no_shift(task) -> None:
    assert build_shift(hand_plan(f"task={task}", "data=synthetic")) is None


@pytest.mark.parametrize(
    ("kind", "sizes", "lacks"),
    [
        ("t5", T5, "decoder_start_token_id"),
        ("t5", {**T5, "decoder_start_token_id": 0, "pad_token_id": None}, "pad_token_id"),
        ("bart", {**WIDE, "decoder_start_token_id": None}, "decoder_start_token_id"),
        ("mbart", {**WIDE, "pad_token_id": None}, "pad_token_id"),
        ("marian", {**WIDE, "decoder_start_token_id": 10**6}, "decoder_start_token_id"),
    ],
)
def test_missing_shift_token_is_named(kind, sizes, lacks, tmp_path) -> None:
    transformers.AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
    with pytest.raises(RunError, match=f"config.json .* {lacks}"):
        build_shift(planned(tmp_path))
