"""How many positions are projected onto the vocabulary, and the FLOPs that are left."""

from statistics import fmean, stdev

import pytest
from unit.training.model.plans import hand_plan, long_plan

from eke.models.families import Tokens
from eke.models.sizes import most_predicted, predicted_frac
from eke.models.sizes.parameters import SampleMeans, tokens_per_sample
from eke.training.batches.dataset import build_data

BERT = ("model=tiny_bert", "task=masked_lm")
SPARSE = "kernels=sparse_prediction"


@pytest.mark.parametrize(
    ("typed", "share"),
    [((*BERT, SPARSE, "task.mask_frac=0.3"), 0.3), (BERT, 1.0), ((SPARSE,), 1.0)],
)
def test_predicted_fraction_is_fixed_only_for_masking(typed, share) -> None:
    assert predicted_frac(hand_plan(*typed).config) == share


@pytest.mark.parametrize("length", [5, 100])
def test_short_rows_have_at_least_one_target(length) -> None:
    """The share of the very samples that a run is given, within 3 standard errors."""
    typed = (*BERT, SPARSE, "data=synthetic", f"data.seq_len={length}")
    plan = long_plan(1000, *typed)
    counts = [cut[0].num_targets for cut in build_data(plan).train_steps(0)]
    error = stdev(counts) / len(counts) ** 0.5
    expected = 2 * length * predicted_frac(plan.config)
    assert fmean(counts) == pytest.approx(expected, abs=3 * error)
    most = most_predicted(plan.config, 2, length)
    assert sum(count > most for count in counts) <= 0.01 * len(counts)


@pytest.mark.parametrize("frac", [0.05, 0.9])
def test_upper_bound_of_masks_is_tight_and_rarely_exceeded(frac) -> None:
    typed = (*BERT, SPARSE, f"task.mask_frac={frac}", "data=synthetic", "data.seq_len=64")
    plan = long_plan(128, *typed)
    counts = [cut[0].num_targets for cut in build_data(plan).train_steps(0)]
    most = most_predicted(plan.config, 2, 64)
    assert sum(count > most for count in counts) <= 2
    assert max(counts) > 0.75 * most
    assert most <= 2 * 64


def test_model_flops_exclude_unpredicted_positions() -> None:
    dense, sparse = (hand_plan(*BERT, *more).size for more in ((), (SPARSE,)))
    config = hand_plan(*BERT).config
    head = 6 * config.model.vocab_size * config.model.hidden_size * config.data.seq_len
    assert dense.flops_per_sample - sparse.flops_per_sample == pytest.approx(0.85 * head)
    assert "predicted tokens" in sparse.flops_formula
    assert "predicted" not in dense.flops_formula
    assert dense.num_parameters == sparse.num_parameters


def test_short_samples_have_a_larger_predicted_share() -> None:
    config = hand_plan(*BERT, SPARSE, "task.mask_frac=0.1").config
    counts = tokens_per_sample(config, SampleMeans(2, 2, 4, 4, 4))
    assert counts[Tokens.predicted] == pytest.approx(2 * 0.1 + 0.9**2)  # one, if by chance none
