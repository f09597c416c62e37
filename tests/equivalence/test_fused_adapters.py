"""`peft.fused` computes what PEFT computes, in every way that a step can be taken."""

import pytest
import torch
from equivalence_cases import CASES, RAGGED
from equivalence_compare import largest_difference
from support import TINY, last_wins
from trained import continue_job, steps_of, train_job

BASE = (*CASES["causal_lm-llama"], *TINY, *RAGGED, "batch.per_device=12", "train.steps=6",
        "peft=lora")  # fmt: skip
FUSED = (*BASE, "peft.fused=true")

WAYS = {
    "accumulation": ("batch.per_device=3 batch.accumulation=4", 1e-5),
    "checkpointing": ("memory=checkpointing", 0.0),
    "selective": ("memory=checkpointing_selective", 1e-5),
    "workers": ("dataloader=workers", 0.0),
    "trainer": ("engine=trainer", 1e-5),
    "compiled": (
        "compile=aot_eager model.num_hidden_layers=1 data.lengths=fixed data.min_len=null",
        1e-5,
    ),
}
"""Other ways to take the same steps, and the bound."""


# While it compiles, torch 2.13 instantiates autograd functions.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_fused_adapters_match_across_techniques(way, curve_of, baseline_of) -> None:
    typed, bound = WAYS[way]
    words = typed.split()
    one = baseline_of(*FUSED, *(w for w in words if w.startswith(("model.", "data."))))
    assert largest_difference(one, curve_of(*last_wins(*FUSED, *words))) <= bound
    assert one[0][0] != one[-1][0], "the loss never moved"


@pytest.mark.parametrize("case", ["causal_lm-llama", "masked_lm-bert", "seq2seq-t5"])
def test_fused_adapter_loss_matches_peft(case, baseline_of) -> None:
    base = last_wins(*BASE, *CASES[case])
    one, other = baseline_of(*base), baseline_of(*base, "peft.fused=true")
    assert largest_difference(one, other) < 1e-5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_run_resumes_bit_exact(precision, make_plan, tmp_path) -> None:
    more = ("peft=lora", "peft.fused=true", f"precision={precision}", "train.steps=4")
    more += ("train.checkpoint_every=2", "train.eval_every=null")
    whole = train_job(make_plan(*last_wins(*TINY, *more)), tmp_path / "whole")
    rest = continue_job(whole, 2, tmp_path / "rest")
    assert steps_of(rest) == {n: found for n, found in steps_of(whole).items() if n > 2}
    assert torch.isfinite(torch.tensor(list(steps_of(whole).values()))).all()
