"""Adapters keep every promise that training all weights keeps, and resume to the bit."""

import pytest
from equivalence_cases import CASES, RAGGED
from equivalence_compare import largest_difference
from support import TINY, last_wins

METHODS = ("lora", "dora", "qlora", "ia3")

STEP = (*RAGGED, "batch.per_device=12", "train.steps=6")

PAIRS = {
    "accumulation": ("batch.per_device=3 batch.accumulation=4", 1e-5),
    "checkpointing": ("memory=checkpointing", 0.0),
    "attention": ("attention=eager", 1e-5),
    "workers": ("dataloader=workers", 0.0),
}
"""Techniques that promise the same mathematics, and the bound."""


@pytest.mark.parametrize(
    ("method", "pair"),
    [
        *(("lora", pair) for pair in PAIRS),
        *(
            pytest.param(method, pair, marks=pytest.mark.slow)
            for method in METHODS[1:]
            for pair in ("accumulation", "checkpointing")
        ),
    ],
)
def test_techniques_agree(method, pair, curve_of, baseline_of) -> None:
    typed, bound = PAIRS[pair]
    base = (*CASES["causal_lm-llama"], *TINY, *STEP, f"peft={method}")
    one, other = baseline_of(*base), curve_of(*last_wins(*base, *typed.split()))
    assert largest_difference(one, other) <= bound
    assert one[0][0] != one[-1][0], "the loss never moved"


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "causal_lm-llama"])
def test_lora_is_independent_of_micro_batch_size(case, curve_of) -> None:
    base = (*CASES[case], *TINY, *STEP, "peft=lora")
    one = curve_of(*base)
    other = curve_of(*last_wins(*base, "batch.per_device=3", "batch.accumulation=4"))
    assert largest_difference(one, other) < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_first_loss_with_adapters_matches_the_base_model(method, baseline_of) -> None:
    """LoRA's B is zero, DoRA's magnitudes are the norms, IA3's scales one; 4 bits are rounded."""
    base = (*CASES["causal_lm-llama"], *TINY, *STEP, "train.steps=1")
    plain, adapted = (baseline_of(*base, f"peft={m}")[0][0] for m in ("none", method))
    difference = abs(plain - adapted) / plain
    assert 0 < difference < 1e-2 if method == "qlora" else difference < 1e-6


# While it compiles, torch 2.13 instantiates bitsandbytes 0.50's product with 4-bit weights.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated:DeprecationWarning")
# It looks at .grad of what DoRA computes its norms from, too; outside pytest it warns and goes on.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["dora", "qlora", "ia3"])
def test_compiled_adapters_agree(method, curve_of) -> None:
    """One layer and one shape: each other one is traced again. LoRA: test_fused_adapters."""
    short = ("train.steps=4", "model.num_hidden_layers=1")
    short = (*short, "data.lengths=fixed", "data.min_len=null", "data.num_samples=24")
    base = (*CASES["causal_lm-llama"], *TINY, *STEP, f"peft={method}", *short)
    one, other = (curve_of(*base, f"compile={backend}") for backend in ("none", "aot_eager"))
    assert largest_difference(one, other) < 1e-5
