"""Traced peaks of families without formulas against what they take on this CPU.

Their checkpoints are made here: small, of transformers' own classes.
"""

import pytest
import transformers
from memory_truth import COMMON, Case, measured_apart, plan_of, step_peak

from eke.estimate.memory import known_forecast, needs_trace
from eke.estimate.memory.trace_client import get_or_run_trace

WIDE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300}
GATED = {**WIDE, "num_key_value_heads": 1, "intermediate_size": 96}
PLACES = {**WIDE, "intermediate_size": 96, "max_position_embeddings": 128}
TWO_STACKS = {
    "d_model": 64, "vocab_size": 300, "decoder_start_token_id": 2,
    "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 96,
    "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 96,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
RELATIVE = {"relative_attention": True, "position_buckets": 32, "pos_att_type": ["p2c", "c2p"]}

FAMILIES = {
    "Gemma2": ("causal_lm", {**GATED, "head_dim": 32}),
    "Falcon": ("causal_lm", {**WIDE, "new_decoder_architecture": True, "alibi": False}),
    "Qwen3Moe": ("causal_lm", {**GATED, **EXPERTS, "head_dim": 32}),
    "OPT": ("causal_lm", {**WIDE, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "DebertaV2": ("masked_lm", {**PLACES, **RELATIVE}),
    "ModernBert": ("masked_lm", {**WIDE, "intermediate_size": 96, "cls_token_id": 1,
                                 "sep_token_id": 2}),
    "Albert": ("sequence_classification", {**PLACES, "embedding_size": 32}),
    "Bart": ("seq2seq_lm", TWO_STACKS),
}  # fmt: skip
HEADS = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_family_without_formulas_is_traced(family, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    task, sizes = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(
        **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    getattr(transformers, HEADS[task]).from_config(config).save_pretrained(tmp_path / "model")
    case = Case(family, (
        "model=pretrained", f"model.name_or_path={tmp_path / 'model'}", f"task={task}",
        "data.seq_len=64", "batch.per_device=4", "data.max_token=250", "data.num_samples=32",
        "precision=bf16", *COMMON,
    ))  # fmt: skip
    plan = plan_of(case)
    assert needs_trace(known_forecast(plan)), "no run starts by formulas that are not its own"
    answer = get_or_run_trace(plan)
    assert answer.traced is not None, answer.reason
    assert step_peak(answer.traced.allocated) == pytest.approx(measured_apart(case), rel=0.01)
