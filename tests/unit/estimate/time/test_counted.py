"""What counted.json says of a layer, against operators counted again on other sizes."""

import pytest
from counted_work import counted
from unit.plan.cases import plan_of

from eke.estimate.memory.components import shape_of
from eke.estimate.time.flops import passes
from eke.hardware import DEVICES

SIZES = ("data=synthetic", "data.seq_len=288", "batch.per_device=7", "batch.accumulation=1",
         "model.hidden_size=448", "model.num_attention_heads=7", "model.intermediate_size=900",
         "model.vocab_size=1700", "model.num_hidden_layers=3", "optimizer=sgd")  # fmt: skip

CASES = {
    "bert-wide": ("model=tiny_bert", "task=masked_lm", "attention=eager", "model.dropout=0.1"),
    "bert-cast": ("model=tiny_bert", "task=masked_lm", "precision=bf16", "model.dropout=0.1"),
    "gpt2-narrow": ("model=tiny_gpt2", "precision=bf16_pure", "model.dropout=0"),
    "llama-cast": ("model=tiny", "precision=bf16", "model.num_key_value_heads=7"),
    "llama-eager": ("model=tiny", "attention=eager"),
    "moe": ("model=tiny_moe", "precision=bf16", "model.num_key_value_heads=7"),
    "t5-cast": ("model=tiny_t5", "task=seq2seq_lm", "precision=bf16", "model.dropout=0"),
}


@pytest.mark.parametrize("name", CASES)
def test_counted_passes_match_real_operators(name) -> None:
    plan = plan_of(*SIZES, *CASES[name], device=DEVICES["a100_80"])
    true = counted(plan)
    forward, backward, layers = passes(plan, shape_of(plan))
    for phase, found in (("forward", forward), ("backward", backward)):
        assert found.launches == pytest.approx(true[phase].launches, rel=0.08), phase
        assert found.moved == pytest.approx(true[phase].moved, rel=0.08), phase
    assert layers.moved < forward.moved
