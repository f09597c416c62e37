"""Logits only where there are labels give the loss and gradient norm of all logits, at every step.

Ragged lengths and masks, so that each micro-batch has its own number of labels; dropout 0; float32.
"""

import pytest
from equivalence_cases import CASES, ONE_SHAPE, RAGGED
from equivalence_compare import largest_difference
from support import TINY, last_wins

SPARSE = "kernels=sparse_prediction"
STEP = (*RAGGED, "batch.per_device=6")
MASKED = CASES["masked_lm-bert"]
BOTH = "kernels.fused_linear_cross_entropy=true"

HEADS = {
    "masked_lm-bert": MASKED,
    "masked_lm-bert-untied": (*MASKED, "model.tie_word_embeddings=false"),
    "causal_lm-llama": CASES["causal_lm-llama"],
    "causal_lm-gpt2": CASES["causal_lm-gpt2"],
    "seq2seq-t5": CASES["seq2seq-t5"],
}
"""With a bias (BERT), scaled (T5), tied and not; the last three leave out padding alone."""


@pytest.mark.parametrize("head", HEADS)
def test_sparse_prediction_computes_the_same_step(head, curve_of, baseline_of) -> None:
    base = last_wins(*HEADS[head], *TINY, *STEP)
    plain, sparse = baseline_of(*base), curve_of(*base, SPARSE)
    assert largest_difference(plain, sparse) < 1e-5
    assert plain[0][0] != plain[-1][0], "the loss never moved"


TECHNIQUES = {
    "accumulated": ("batch.per_device=2", "batch.accumulation=3"),
    "fused": (BOTH,),
    "checkpointing": ("memory=checkpointing",),
    "in the backward pass": ("memory=optimizer_in_backward", "train.max_grad_norm=null"),
    "by Trainer": ("engine=trainer", "batch.per_device=2", "batch.accumulation=3"),
    "compiled": ("compile=aot_eager", *ONE_SHAPE),
}
QUICK = ("accumulated", "fused", "by Trainer")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TECHNIQUES]
)
def test_sparse_prediction_computes_the_same_step_with_techniques(
    name, curve_of, baseline_of
) -> None:
    base = (*MASKED, *TINY, *STEP, "train.max_grad_norm=null")
    found = curve_of(*last_wins(*base, SPARSE, *TECHNIQUES[name]))
    rows = [o for o in TECHNIQUES[name] if o in ONE_SHAPE]
    assert largest_difference(baseline_of(*base, *rows), found) < 1e-5


@pytest.mark.slow
def test_last_step_of_an_epoch_may_have_fewer_samples(curve_of) -> None:
    """Trainer fills it up with micro-batches that have no label, and nothing to project."""
    base = last_wins(*MASKED, *TINY, *STEP, "data.num_samples=14", "batch.per_device=2")
    cut = (*base, "batch.accumulation=3", "engine=trainer")
    assert largest_difference(curve_of(*cut), curve_of(*cut, SPARSE)) < 1e-5


def test_position_errors_are_detected(curve_of, baseline_of, monkeypatch) -> None:
    from eke.training.batches.batches import MicroBatch

    base = (*MASKED, *TINY, *STEP)
    plain = baseline_of(*base)
    true = MicroBatch.__init__

    def shifted(self, *args, places=None, **kwargs) -> None:
        true(self, *args, places=None if places is None else (places - 1).clamp(min=0), **kwargs)

    monkeypatch.setattr(MicroBatch, "__init__", shifted)
    assert largest_difference(plain, curve_of(*base, SPARSE)) > 1e-3
