"""The projection fused with the loss gives the plain loss and gradient norm, at every step.

Ragged lengths, so that there are labels to be ignored; dropout 0; float32.
"""

import pytest
import torch
from equivalence_cases import CASES, ONE_SHAPE, RAGGED
from equivalence_compare import largest_difference
from support import TINY, last_wins

FUSED = "kernels=fused_linear_cross_entropy"
STEP = (*RAGGED, "batch.per_device=6", "optimizer=sgd")
"""SGD, since Adam's first steps are as long for a gradient of rounding errors as for any other."""

HEADS = {
    **{name: case for name, case in CASES.items() if "classification" not in name},
    "causal_lm-qwen3": ("model=tiny_qwen3",),
    "causal_lm-moe": ("model=tiny_moe",),
    "causal_lm-llama-untied": ("model=tiny", "model.tie_word_embeddings=false"),
    "masked_lm-bert-untied": (
        "model=tiny_bert",
        "task=masked_lm",
        "model.tie_word_embeddings=false",
    ),
    "seq2seq-t5-gated": ("model=tiny_t5", "task=seq2seq_lm", "model.gated=true"),
}
"""Every family's head: with a bias (BERT), scaled (T5), tied to the embeddings and not."""


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_fused_loss_computes_the_same_step(head, curve_of, baseline_of) -> None:
    base = last_wins(*HEADS[head], *TINY, *STEP)
    plain, fused = baseline_of(*base), curve_of(*base, FUSED)
    assert largest_difference(plain, fused) < 2e-6
    assert plain[0][0] != plain[-1][0], "the loss never moved"


TECHNIQUES = {
    "accumulated": ("batch.per_device=2", "batch.accumulation=3"),
    "checkpointing": ("memory=checkpointing",),
    "padding-free": ("data.packing=padding_free",),
    "compiled": ("compile=aot_eager", *ONE_SHAPE),
}


@pytest.mark.parametrize(
    "name",
    [n if n == "accumulated" else pytest.param(n, marks=pytest.mark.slow) for n in TECHNIQUES],
)
def test_fused_loss_computes_the_same_step_with_techniques(name, curve_of, baseline_of) -> None:
    base = (*CASES["causal_lm-llama"], *TINY, *STEP)
    rows = [o for o in TECHNIQUES[name] if o in ONE_SHAPE]
    fused = curve_of(*base, FUSED, *TECHNIQUES[name])
    assert largest_difference(baseline_of(*base, *rows), fused) < 2e-6


@pytest.mark.slow
def test_fused_loss_computes_the_same_step_compiled(curve_of, baseline_of) -> None:
    """Each other shape or layer costs half a minute of C++, and none is the loss's."""
    base = (*CASES["causal_lm-llama"], *TINY, *STEP, *ONE_SHAPE)
    fused = curve_of(*base, FUSED, "compile=inductor")
    assert largest_difference(baseline_of(*base), fused) < 2e-6


ROUNDING = {"fp16": 2**-11, "bf16": 2**-8}
"""Largest relative error of rounding a number to 11 and to 8 significant bits."""

FEWEST_TARGETS = 13
"""In one of these steps; independent errors of n losses leave their mean with 1 / sqrt(n)."""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ROUNDING)
def test_16_bit_fused_loss_adds_only_rounding(precision, curve_of, baseline_of) -> None:
    """The fused operation rounds the same operands, and then the loss of every target."""
    base = (*CASES["causal_lm-llama"], *TINY, *STEP)
    exact = baseline_of(*base)
    plain, fused = (curve_of(*base, f"precision={precision}", o) for o in ("kernels=none", FUSED))

    def furthest(curve: list[tuple[float, float]]) -> float:
        return max(abs(a[0] - b[0]) / a[0] for a, b in zip(exact, curve, strict=True))

    assert 1e-7 < furthest(fused) < 10 * 2**-9
    rounded_losses = ROUNDING[precision] / FEWEST_TARGETS**0.5
    assert furthest(fused) < furthest(plain) + rounded_losses


def test_counting_ignored_labels_is_detected(curve_of, baseline_of, monkeypatch) -> None:
    base = (*CASES["causal_lm-llama"], *TINY, *STEP)
    plain = baseline_of(*base)
    from eke.training.model import loss

    true_loss = loss.fused_loss_sum
    monkeypatch.setattr(
        loss,
        "fused_loss_sum",
        lambda hidden, weight, bias, labels, *how: true_loss(
            hidden, weight, bias, labels.clamp(min=0), *how
        ),
    )
    assert largest_difference(plain, curve_of(*base, FUSED)) > 1e-3


def test_fused_loss_sum_does_not_overflow_in_float16() -> None:
    """PyTorch's own sum in float16 ends at 65504: 12000 targets at 6 nats are beyond it."""
    from eke.training.model.fused_loss import fused_loss_sum

    torch.manual_seed(0)
    hidden = torch.randn(12000, 8)
    weight = torch.randn(400, 8) * 0.1
    labels = torch.randint(0, 400, (12000,))
    exact = fused_loss_sum(hidden, weight, None, labels)
    half = fused_loss_sum(hidden.half(), weight.half(), None, labels)
    assert exact > 65504
    torch.testing.assert_close(half, exact, rtol=1e-3, atol=0)
