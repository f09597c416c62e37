"""recipe=fastest trains as recipe=baseline does, but for the rounding of its products."""

import pytest
from support import TINY

WIDE = (
    *TINY,
    "model=tiny",
    "model.hidden_size=256",
    "data.seq_len=16",
    "data.num_samples=128",
    "data.num_eval_samples=4",
    "batch.target=8",
    "train.steps=24",
    "train.log_every=1",
    "train.checkpoint_every=null",
    "train.save_final=false",
)


@pytest.mark.slow
def test_fastest_recipe_keeps_baseline_losses(curve_of, monkeypatch) -> None:
    """The same samples in the same order from the same weights. The bound is that of 16 bits in
    test_same_mathematics, ten times bfloat16's 2^-9; equal to the last digit would mean that
    nothing ran in 16 bits."""
    monkeypatch.setattr("eke.workflows.auto_batch.bfloat16_units", lambda: ("avx512_bf16",))
    baseline, fastest = (curve_of(*WIDE, f"recipe={name}") for name in ("baseline", "fastest"))
    losses = [(a[0], b[0]) for a, b in zip(baseline, fastest, strict=True)]
    assert len(losses) == 24
    assert losses[-1][0] < 0.9 * losses[0][0], "something was learnt"
    assert 1e-7 < max(abs(a - b) / a for a, b in losses) < 10 * 2**-9
