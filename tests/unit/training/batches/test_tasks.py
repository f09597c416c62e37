"""From tokens to samples of each task; labels are aligned with the logits."""

import numpy as np
import pytest
from unit.models.sizes.configs import make_config

from eke.common.text import EOS, IGNORED, MASK, NUM_SPECIAL_TOKENS
from eke.config.schema import VARIANTS
from eke.training.batches.sampler import TokenRow
from eke.training.batches.tasks import TASKS, TaskSamples


class Counting:
    """A source whose sample n is 8, 9, 10, ...: tokens that are their own positions."""

    def __init__(self, length=24) -> None:
        self.length = length

    def __len__(self) -> int:
        return 100

    framed = False

    def row(self, index):
        return TokenRow(np.arange(NUM_SPECIAL_TOKENS, NUM_SPECIAL_TOKENS + self.length))

    def label(self, index):
        return index % 3


def samples(*overrides, length=24):
    return TaskSamples(Counting(length), make_config("data=synthetic", *overrides))


def test_every_task_has_samples() -> None:
    assert set(TASKS) == set(VARIANTS["task"]) - {"custom"}


def test_causal_labels_are_the_next_tokens() -> None:
    made = samples("task=causal_lm")[0, 0]
    assert made["input_ids"].tolist() == list(range(8, 32))
    assert made["labels"].tolist() == [*range(9, 32), IGNORED]


MASKED = ("task=masked_lm", "model=tiny_bert")


@pytest.mark.parametrize("frac", [0.15, 0.4], ids=str)
def test_eight_of_ten_selected_tokens_are_masked(frac) -> None:
    source = samples(*MASKED, f"task.mask_frac={frac}", length=200)
    made = [source[0, index] for index in range(100)]
    inputs = np.stack([m["input_ids"] for m in made])
    labels = np.stack([m["labels"] for m in made])
    original = np.broadcast_to(Counting(200).row(0).tokens, inputs.shape)
    chosen = labels != IGNORED
    assert (labels[chosen] == original[chosen]).all()
    assert (inputs[~chosen] == original[~chosen]).all(), "what is not predicted is not touched"
    total = int(chosen.sum())
    # 20000 draws: the bounds are five standard deviations wide
    assert total / chosen.size == pytest.approx(frac + (1 - frac) / 200, abs=0.018)
    masked = int((inputs == MASK)[chosen].sum()) / total
    kept = int((inputs == original)[chosen].sum()) / total
    assert masked == pytest.approx(0.8, abs=0.04)
    assert kept == pytest.approx(0.1, abs=0.03)
    assert inputs[chosen][inputs[chosen] != MASK].min() >= NUM_SPECIAL_TOKENS


def test_masks_differ_between_epochs_samples_and_seeds() -> None:
    source = samples(*MASKED)
    other = samples(*MASKED, "seed=1")
    made = [source[0, 0], source[1, 0], source[0, 1], other[0, 0]]
    assert len({tuple(m["labels"].tolist()) for m in made}) == 4
    assert source[0, 0]["input_ids"].tolist() == made[0]["input_ids"].tolist(), "the same twice"


@pytest.mark.parametrize("length", [3, 100])
def test_masked_fraction_matches_the_request(length) -> None:
    """The share that was asked for; one token at least where none was chosen."""
    frac, count = 0.15, 1000
    source = samples(*MASKED, length=length)
    chosen = [int((source[0, n]["labels"] != IGNORED).sum()) for n in range(count)]
    expected = length * frac + (1 - frac) ** length
    error = np.std(chosen) / count**0.5
    assert np.mean(chosen) == pytest.approx(expected, abs=3 * error)


def test_classification_ends_in_eos_and_keeps_the_source() -> None:
    source = samples("task=sequence_classification", "task.num_labels=3")
    made = source[0, 5]
    assert made["input_ids"].tolist() == [*range(8, 31), EOS]
    assert made["labels"].shape == ()
    assert [source[0, n]["labels"].item() for n in range(4)] == [0, 1, 2, 0]
    assert Counting().row(0).tokens[-1] == 31


SEQ2SEQ = ("task=seq2seq_lm", "model=tiny_t5")


def test_target_follows_the_source_and_is_shifted() -> None:
    made = samples(*SEQ2SEQ, "data.seq_len=16", "task.target_len=8")[0, 0]
    assert made["input_ids"].tolist() == list(range(8, 24))
    assert made["labels"].tolist() == [*range(24, 31), EOS]
    made = samples(*SEQ2SEQ, "data.seq_len=12")[0, 0]  # the target is as long as the source
    assert len(made["input_ids"]) == len(made["labels"]) == 12


def test_ragged_samples_keep_the_proportion_and_both_parts() -> None:
    for length in (2, 3, 11, 23):
        made = samples(*SEQ2SEQ, "data.seq_len=16", "task.target_len=8", length=length)[0, 0]
        source, target = len(made["input_ids"]), len(made["labels"])
        assert source + target == length
        assert min(source, target) >= 1
        assert abs(source - length * 2 / 3) <= 1
        assert made["labels"][-1] == EOS
