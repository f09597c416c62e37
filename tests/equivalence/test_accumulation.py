"""However a global batch is cut, each step computes the same loss and the same gradient.

Ragged lengths, padding, ignored labels and an uneven last batch; dropout 0; float32. The bound is
the contract's 1e-5 relative over 20 steps and more: what remains is the order of additions.
"""

import pytest
import torch
import torch.nn.functional as F
from equivalence_cases import CASES, RAGGED
from equivalence_compare import largest_difference
from support import TINY

from eke.training.model import loss

LONG = (*RAGGED, "train.steps=24")
CUTS = {
    "12x1": ("batch.per_device=12", "batch.accumulation=1"),
    "3x4": ("batch.per_device=3", "batch.accumulation=4"),
    "1x12": ("batch.per_device=1", "batch.target=12"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_micro_batch_size_does_not_change_the_step(case, curve_of) -> None:
    curves = {name: curve_of(*case, *TINY, *LONG, *cut) for name, cut in CUTS.items()}
    assert largest_difference(curves["12x1"], curves["3x4"]) < 1e-5
    assert largest_difference(curves["12x1"], curves["1x12"]) < 1e-5
    assert curves["12x1"][0][0] != curves["12x1"][-1][0], "the loss never moved"


@pytest.mark.slow
def test_missing_loss_division_is_detected(curve_of, baseline_of, monkeypatch) -> None:
    """The planted error of HF Trainer: each micro-batch contributes its own mean, not its share."""
    case = (*CASES["classification-bert"], *TINY, *RAGGED)
    whole = baseline_of(*case, *CUTS["12x1"])

    def mean_of_micro_batch(logits, labels, *how):
        mean = F.cross_entropy(logits.float(), labels)
        return mean * 12  # undone by the division by the 12 targets of the step

    monkeypatch.setattr(loss, "loss_sum", mean_of_micro_batch)
    cut = curve_of(*case, *CUTS["3x4"])
    assert cut[0][0] == pytest.approx(4 * whole[0][0], rel=0.2)
    assert largest_difference(whole, cut) > 1e-2


@pytest.mark.slow
def test_mean_per_micro_batch_is_detected_with_ragged_text(
    curve_of, baseline_of, monkeypatch
) -> None:
    """The subtler error: means of micro-batches averaged, though they hold unequal token counts."""
    case = (*CASES["causal_lm-llama"], *TINY, *RAGGED)
    whole = baseline_of(*case, *CUTS["12x1"])
    true_sum = loss.loss_sum

    def averaged(logits, labels, *how):
        count = (labels != -100).sum()
        return true_sum(logits, labels) / count * (12 * 13.5 / 4)  # the expected tokens of a cut

    monkeypatch.setattr(loss, "loss_sum", averaged)
    assert largest_difference(whole, curve_of(*case, *CUTS["3x4"])) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("option", ["adafactor", "sgd"])
def test_micro_batch_sizes_agree_for_other_optimizers(option, curve_of) -> None:
    case = (*CASES["masked_lm-bert"], *TINY, *RAGGED, f"optimizer={option}")
    case = tuple(o for o in case if not o.startswith("optimizer.lr"))
    first = curve_of(*case, *CUTS["12x1"])
    assert largest_difference(first, curve_of(*case, *CUTS["3x4"])) < 1e-5


def test_loss_is_the_mean_over_all_targets() -> None:
    """Against torch's own mean over the concatenated batch."""
    from eke.training.model.loss import loss_sum

    torch.manual_seed(0)
    logits, labels = torch.randn(4, 7, 11), torch.randint(0, 11, (4, 7))
    labels[0, 3:] = -100
    parts = [loss_sum(logits[i : i + 1], labels[i : i + 1]) for i in range(4)]
    mean = sum(parts) / int((labels != -100).sum())
    torch.testing.assert_close(mean, F.cross_entropy(logits.view(-1, 11), labels.view(-1)))
