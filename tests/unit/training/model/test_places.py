"""Whether, and on which side, a model takes padding; and that causal models do not look ahead."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from prepared import write_jsonl
from tokenizer_kinds import save_kind

from eke.common.errors import RunError
from eke.plan.planner import Plan
from eke.training.batches.batches import Collator
from eke.training.model.build_model import build_model_and_report
from eke.training.model.model_checks import HEADS, check_positions, padding_side

WIDTH = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 32, "max_position_embeddings": 64}  # fmt: skip
XLNET = {"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32}
PERCEIVER = {"num_latents": 4, "d_latents": 32, "d_model": 32, "num_blocks": 1,
             "num_self_attends_per_block": 1, "num_self_attention_heads": 2,
             "num_cross_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip
pytestmark = pytest.mark.usefixtures("own_cache")
PAD = 1


def make(kind: str, task: str, sizes, **more):
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=150, **sizes, pad_token_id=PAD, bos_token_id=0, eos_token_id=2, **more
    )
    torch.manual_seed(0)
    model = getattr(transformers, HEADS[task]).from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize(
    ("kind", "task", "sizes", "side"),
    [
        ("roberta", "sequence_classification", WIDTH, "right"),
        ("gpt_neox", "sequence_classification", WIDTH, "right"),
        ("xlnet", "sequence_classification", XLNET, "left"),
        ("fnet", "masked_lm", WIDTH, ""),
        ("convbert", "masked_lm", {**WIDTH, "embedding_size": 32, "head_ratio": 2}, ""),
    ],
)
def test_padding_side_is_detected(kind, task, sizes, side) -> None:
    assert padding_side(make(kind, task, sizes), task, PAD) == side


@torch.no_grad()
def test_left_padded_rows_are_classified_like_single_rows() -> None:
    model = make("xlnet", "sequence_classification", XLNET)
    rows = [np.arange(10, 13), np.arange(10, 18)]
    samples = [{"input_ids": row, "labels": np.asarray(0)} for row in rows]
    alone = [model(input_ids=torch.from_numpy(row)[None]).logits for row in rows]
    batch = Collator(needs_mask=True, pad=PAD, left=True)(samples)
    assert torch.allclose(model(**batch.inputs).logits, torch.cat(alone), atol=1e-6)
    other = Collator(needs_mask=True, pad=PAD)(samples)
    assert not torch.allclose(model(**other.inputs).logits, torch.cat(alone), atol=1e-3)


def test_bidirectional_model_is_rejected_for_causal_lm() -> None:
    check_positions(make("roberta", "causal_lm", WIDTH, is_decoder=True), "causal_lm")
    for kind, sizes in (("roberta", WIDTH), ("xlnet", XLNET)):
        with pytest.raises(RunError, match="task=masked_lm"):
            check_positions(make(kind, "causal_lm", sizes), "causal_lm")


def test_model_without_padding_support_is_trained_row_by_row() -> None:
    model = make("xlnet", "causal_lm", XLNET, attn_type="uni")
    with pytest.raises(RunError, match=r"batch\.per_device=1"):
        padding_side(model, "causal_lm", PAD)


def test_output_without_position_per_token_is_rejected() -> None:
    with pytest.raises(RunError, match="64 outputs for 8 tokens"):
        check_positions(make("perceiver", "masked_lm", PERCEIVER), "masked_lm")


def planned(make_plan, folder: Path, kind: str, task: str, sizes) -> Plan:
    """Rows of different lengths on such a checkpoint."""
    make(kind, task, sizes).save_pretrained(save_kind(folder / "mine", "unigram with cls"))
    texts = ["the cat saw a bird", "hello", "what is 4 plus 52"] * 4
    rows = [{"text": f"{text} {n}", "label": n % 2} for n, text in enumerate(texts)]
    path = write_jsonl(folder / "rows.jsonl", rows)
    return make_plan(
        "model=pretrained", f"model.name_or_path={folder / 'mine'}", f"task={task}", "data=jsonl",
        f"data.path={path}", "data.seq_len=48", "train.steps=1", "tracker=none",
        planning=True,  # what runs is traced first, where no formula knows the model
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "task", "sizes", "side"),
    [
        ("xlnet", "sequence_classification", XLNET, "left"),
        ("fnet", "masked_lm", WIDTH, ""),
        ("perceiver", "sequence_classification", PERCEIVER, "right"),  # without a table
    ],
)
def test_report_holds_the_padding_side(kind, task, sizes, side, make_plan, tmp_path) -> None:
    plan = planned(make_plan, tmp_path, kind, task, sizes)
    _, report = build_model_and_report(plan, torch.device("cpu"))
    assert report.padding == side
    warned = any("padding changes" in warning for warning in report.warnings)
    assert warned is (side == "")


def test_quantizer_buffers_are_not_position_tables(make_plan, tmp_path) -> None:
    plan = planned(make_plan, tmp_path, "ibert", "masked_lm", WIDTH)
    model, report = build_model_and_report(plan, torch.device("cpu"))
    assert model.lm_head.decoder.weight is model.ibert.embeddings.word_embeddings.weight
    assert not report.new_weights
    assert not report.unreached
