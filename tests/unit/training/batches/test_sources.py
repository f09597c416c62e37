"""Less padding without another result: order by length, rows that are shared, special ids."""

import numpy as np
import pytest
import torch
from unit.plan.cases import plan_of

from eke.common.text import IGNORED
from eke.config.schema import Lengths, Synthetic
from eke.data.sources import Vocabulary, first_fit, synthetic_lengths
from eke.training.batches.batches import Collator, SampleOrder
from eke.training.batches.dataset import build_data
from eke.training.model.attention_kernels import sequence_numbers
from eke.training.model.build_model import build_model
from eke.training.model.load_pretrained import set_special_ids

RAGGED = (
    "data=synthetic",
    "data.lengths=uniform",
    "data.min_len=2",
    "data.seq_len=64",
    "data.num_samples=600",
    "batch.per_device=4",
    "batch.accumulation=2",
    "train.steps=40",
)


def test_grouping_saves_padding_and_is_measured() -> None:
    shares = []
    for grouping in ("false", "true"):
        data = build_data(plan_of(*RAGGED, f"data.length_grouping={grouping}"))
        assert data.padding_frac is None
        list(data.train_steps(0))
        shares.append(data.padding_frac)
    assert shares[0] > 0.3
    assert shares[1] < 0.1


def test_grouped_epoch_holds_every_sample_once_in_random_order() -> None:
    lengths = np.arange(1, 104)
    order = SampleOrder(103, 10, 0, lengths)
    first, second = (list(order.steps(11 * epoch, 11 * epoch + 11)) for epoch in (0, 1))
    for steps in (first, second):
        assert sorted(index for step in steps for _, index in step) == list(range(103))
        assert [len(step) for step in steps] == [10] * 10 + [3], "the smaller step is the last"
    longest = [max(lengths[index] for _, index in step) for step in first]
    assert longest != sorted(longest, reverse=True), "steps are not shuffled"
    assert [[i for _, i in s] for s in first] != [[i for _, i in s] for s in second]
    assert list(order.steps(5, 20)) == list(order.steps(0, 20))[5:], "a resume"


def test_padding_free_is_one_row() -> None:
    samples = [
        {"input_ids": np.array(t), "labels": np.array([*t[1:], IGNORED])}
        for t in ([5, 6, 7], [8], [9, 10])
    ]
    batch = Collator(needs_mask=False, padding_free=True, multiple=4)(samples)
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 0, 0]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 0, 0]]
    assert batch.labels.tolist() == [[6, 7, -100, -100, 10, -100, -100, -100]]
    assert (batch.num_samples, batch.num_targets, batch.num_tokens) == (3, 3, 6)
    assert batch.num_positions == 8
    numbers = sequence_numbers(batch.inputs["position_ids"]).tolist()
    assert numbers == [[1, 1, 1, 2, 3, 3, 4, 5]]


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([6, 5, 4, 5], [[0, 2], [1, 3]]),
        ([10, 10], [[0], [1]]),
        ([1] * 25, [list(range(10)), list(range(10, 20)), list(range(20, 25))]),
        ([], []),
    ],
    ids=["first fit", "full", "ones", "none"],
)
def test_first_fit_packing(lengths, rows) -> None:
    packs = first_fit(np.array(lengths, np.int64), 10)
    assert [packs.row(n).tolist() for n in range(len(packs))] == rows


def test_packing_of_many_keeps_all_within_their_rows() -> None:
    lengths = np.random.default_rng(0).integers(1, 33, 70_000)
    packs = first_fit(lengths, 32)
    sums = np.add.reduceat(lengths[packs.members], packs.offsets[:-1])
    assert sums.max() <= 32
    assert sorted(packs.members.tolist()) == list(range(70_000))
    assert len(packs) < 1.1 * lengths.sum() / 32


def test_lognormal_lengths_have_the_stated_median_and_spread() -> None:
    data = Synthetic(seq_len=4096, lengths=Lengths.lognormal, median_len=100, sigma=0.5)
    logs = np.log(synthetic_lengths(data, 4096, 0, 4000))
    # standard errors: 0.5 x 1.25 / sqrt(4000) = 0.01 of the median, 0.006 of the deviation
    assert np.median(logs) == pytest.approx(np.log(100), abs=0.05)
    assert logs.std() == pytest.approx(0.5, abs=0.03)
    clipped = Synthetic(seq_len=50, lengths=Lengths.lognormal, median_len=40, sigma=2, min_len=9)
    found = synthetic_lengths(clipped, 50, 0, 500)
    assert (found.min(), found.max()) == (9, 50)


def test_plan_counts_packed_synthetic_rows() -> None:
    plan = plan_of(*RAGGED, "data.packing=on")
    data = build_data(plan)
    assert len(data.train) == plan.steps.num_train_samples < 400
    assert len(data.evaluation) == plan.steps.num_eval_samples < 64
    assert plan.run_id != plan_of(*RAGGED).run_id


@pytest.mark.parametrize(
    ("task", "pad_is_eos", "padding"),
    [("causal_lm", True, None), ("sequence_classification", True, 7), ("causal_lm", False, 7)],
    ids=["end pads", "classifier", "own padding"],
)
def test_tokenizer_special_ids_reach_the_model(task, pad_is_eos, padding) -> None:
    import dataclasses

    vocabulary = Vocabulary("other", 300, pad=7, pad_is_eos=pad_is_eos, bos=None, eos=9)
    plan = plan_of(f"task={task}", "data=synthetic", "train.steps=1")
    plan = dataclasses.replace(plan, vocabulary=vocabulary)
    model = build_model(plan, torch.device("meta"))
    assert model.config.pad_token_id == padding
    assert model.config.eos_token_id == 9
    assert model.model.embed_tokens.padding_idx == padding
    unchanged = build_model(plan_of("train.steps=1", "data=synthetic"), torch.device("meta"))
    before = unchanged.config.to_dict()
    set_special_ids(unchanged.config, plan_of("train.steps=1", "data=synthetic"))
    assert unchanged.config.to_dict() == before
