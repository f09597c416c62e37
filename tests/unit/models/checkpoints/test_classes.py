"""What is read from the source of transformers' classes is what the imported classes say."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

from eke.models.checkpoints.architecture import (
    MAPPINGS,
    adds_router_loss,
    class_attribute,
    first_position,
    supports,
)

FLAGS = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")

SOME = (
    "llama", "gpt2", "bert", "t5", "gemma2", "bloom", "deberta-v2", "bart", "gpt-sw3", "internlm3",
)  # fmt: skip
"""With sdpa and without; the last two have no source under their own name."""


def imported(kind: str, task: str) -> Any:
    """The class of a model type and a task; None where it has none."""
    name = getattr(modeling_auto, MAPPINGS[task]).get(kind)
    return name and getattr(transformers, name[0] if isinstance(name, tuple) else name)


def differences(kind: str, task: str) -> list[tuple[str, str, str]]:
    head = imported(kind, task)
    right = {flag: None if head is None else getattr(head, flag) for flag in FLAGS}
    return [
        (kind, task, flag) for flag in FLAGS if class_attribute(kind, task, flag) != right[flag]
    ]


@pytest.mark.parametrize("kind", SOME)
def test_class_flags_match_the_imported_class(kind) -> None:
    assert [d for task in MAPPINGS for d in differences(kind, task)] == []


def test_class_flags_include_true_and_false() -> None:
    found = {kind: class_attribute(kind, "causal_lm", "_supports_sdpa") for kind in SOME}
    assert {found["llama"], found["gemma2"], found["t5"]} == {True, False, None}


@pytest.mark.parametrize(
    ("kind", "adds"),
    [
        ("mixtral", True), ("qwen3_moe", True), ("jetmoe", True), ("dbrx", True),
        ("hy_v3", False), ("deepseek_v3", False), ("llama", False), ("nobodys", False),
    ],
)  # fmt: skip
def test_router_loss_of_a_class_is_detected(kind, adds) -> None:
    assert adds_router_loss(kind, "causal_lm") == adds
    assert not adds_router_loss(kind, "sequence_classification")


def test_unknown_model_type_has_no_class_attributes() -> None:
    assert class_attribute("nobodys", "causal_lm", "_supports_sdpa") is None
    assert first_position("nobodys", 1) == 0


@pytest.mark.slow
def test_class_flags_match_for_every_task() -> None:
    every = [(kind, task) for task in MAPPINGS for kind in getattr(modeling_auto, MAPPINGS[task])]
    assert len(every) > 350
    assert [d for kind, task in every for d in differences(kind, task)] == []


NUM_POSITIONS = 16
SIZES = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": NUM_POSITIONS, "bos_token_id": 0,
    "eos_token_id": 2,
}  # fmt: skip
MASKED, CAUSAL = "AutoModelForMaskedLM", "AutoModelForCausalLM"
TABLES = {
    "roberta": (MASKED, {}),
    "xlm-roberta": (MASKED, {}),
    "camembert": (MASKED, {}),
    "mpnet": (MASKED, {}),
    "longformer": (MASKED, {"attention_window": [4]}),
    "data2vec-text": (MASKED, {}),
    "esm": (MASKED, {"mask_token_id": 3}),
    "ibert": (MASKED, {}),
    "bert": (MASKED, {}),
    "electra": (MASKED, {"embedding_size": 16}),
    "distilbert": (MASKED, {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}),
    "gpt2": (CAUSAL, {}),
    "bart": ("AutoModelForSeq2SeqLM", {"encoder_layers": 1, "decoder_layers": 1}),
    "opt": (CAUSAL, {"ffn_dim": 16, "word_embed_proj_dim": 16}),
}
"""Model type -> transformers' class with a head, and sizes of its own."""


@pytest.mark.parametrize("kind", TABLES)
def test_max_positions_match_the_table(kind) -> None:
    pad = 1 if kind == "mpnet" else 5  # its table keeps the rows up to 1, whatever is configured
    head, more = TABLES[kind]
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **more, "pad_token_id": pad})
    model = getattr(transformers, head).from_config(config).eval()
    limit = NUM_POSITIONS - first_position(kind, pad)
    with torch.no_grad():
        logits = model(input_ids=torch.full((1, limit), 9)).logits
        assert logits.shape[:2] == (1, limit)
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, limit + 1), 9))


@pytest.mark.parametrize(
    ("parts", "sdpa"),
    [
        (("roberta", "gpt2"), True),
        (("bert", "bloom"), False),
        (("deberta-v2", "bert"), False),
        (("nobodys", "bert"), None),
    ],
    ids=str,
)
def test_encoder_decoder_supports_the_intersection(parts, sdpa) -> None:
    encoder, decoder = ({"model_type": kind} for kind in parts)
    raw = {"model_type": "encoder-decoder", "encoder": encoder, "decoder": decoder}
    assert supports(raw, "seq2seq_lm", "sdpa") is sdpa
