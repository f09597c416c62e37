"""Padding, counting, and which samples each optimizer step sees."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eke.common.text import IGNORED, PAD
from eke.training.batches.batches import Collator, SampleOrder, cut_step


def sample(*tokens, labels=None):
    return {
        "input_ids": np.asarray(tokens),
        "labels": np.asarray(tokens if labels is None else labels),
    }


def test_samples_are_padded_to_the_longest() -> None:
    batch = Collator(needs_mask=True)(
        [sample(5, 6, 7, labels=[6, 7, IGNORED]), sample(8, labels=[9])]
    )
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7], [8, PAD, PAD]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.labels.tolist() == [[6, 7, IGNORED], [9, IGNORED, IGNORED]]
    assert (batch.num_samples, batch.num_targets, batch.num_tokens) == (2, 3, 4)


def test_class_labels_are_stacked() -> None:
    batch = Collator(needs_mask=False)([sample(5, 6, labels=1), sample(8, labels=0)])
    assert batch.labels.tolist() == [1, 0]
    assert batch.labels.dtype == torch.int64
    assert (batch.num_samples, batch.num_targets, batch.num_tokens) == (2, 2, 3)


def test_source_and_target_are_padded_separately() -> None:
    def shift(labels):
        return labels.roll(1, 1).clamp(min=0)

    batch = Collator(needs_mask=True, shift=shift)(
        [sample(5, labels=[6, 2]), sample(7, 8, 9, labels=[2])]
    )
    assert batch.inputs["input_ids"].shape == (2, 3)
    assert batch.inputs["decoder_input_ids"].tolist() == [[2, 6], [0, 2]]
    assert batch.labels.tolist() == [[6, 2], [2, IGNORED]]
    assert batch.num_tokens == 4 + 3
    assert batch.num_targets == 3


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(8, 99), min_size=1, max_size=6), min_size=1, max_size=5))
def test_counts_are_sums_over_samples(rows) -> None:
    batch = Collator(needs_mask=True)([sample(*row) for row in rows])
    assert batch.num_tokens == sum(map(len, rows)) == int(batch.inputs["attention_mask"].sum())
    assert batch.num_targets == batch.num_tokens
    for number, row in enumerate(rows):
        assert batch.inputs["input_ids"][number, : len(row)].tolist() == row


def test_label_positions_index_the_flattened_batch() -> None:
    batch = Collator(needs_mask=False, sparse=True)(
        [sample(5, 6, 7, labels=[IGNORED, 7, IGNORED]), sample(8, labels=[9])]
    )
    assert batch.places is not None
    assert batch.places.tolist() == [1, 3]
    assert batch.labels.flatten()[batch.places].tolist() == [7, 9]
    empty = batch.without_targets()
    assert empty.places is not None
    assert empty.places.shape == (0,)
    assert Collator(needs_mask=False)([sample(5)]).places is None


def test_moved_batch_keeps_its_counts() -> None:
    batch = Collator(needs_mask=True, sparse=True)([sample(5, 6), sample(8)])
    moved = batch.to(torch.device("meta"))
    assert moved.labels.device.type == "meta"
    assert {t.device.type for t in moved.tensors} == {"meta"}
    assert len(moved.tensors) == 4, "ids, mask, labels and their places"
    assert (moved.num_samples, moved.num_targets, moved.num_tokens) == (2, 3, 3)


orders = st.builds(SampleOrder, st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**31))


@settings(max_examples=40)
@given(order=orders)
def test_every_epoch_holds_every_sample_once(order) -> None:
    per_epoch = order.steps_per_epoch
    steps = list(order.steps(0, 2 * per_epoch))
    for epoch in (0, 1):
        keys = [key for step in steps[epoch * per_epoch : (epoch + 1) * per_epoch] for key in step]
        assert sorted(keys) == [(epoch, index) for index in range(order.num_samples)]
    assert all(1 <= len(step) <= order.samples_per_step for step in steps)


@settings(max_examples=40)
@given(order=orders, start=st.integers(0, 30), count=st.integers(0, 10))
def test_resume_at_any_step_yields_the_same_samples(order, start, count) -> None:
    whole = list(order.steps(0, start + count))
    assert list(order.steps(start, start + count)) == whole[start:]


@settings(max_examples=40)
@given(
    order=orders,
    per_device=st.integers(1, 8),
    world_size=st.integers(1, 4),
)
def test_micro_batch_size_changes_no_sample(order, per_device, world_size) -> None:
    """However a step is cut into micro-batches and ranks, together they are its samples, once."""
    for keys in order.steps(0, order.steps_per_epoch + 1):
        cuts = [cut_step(keys, per_device, rank, world_size) for rank in range(world_size)]
        assert all(1 <= len(piece) <= per_device for cut in cuts for piece in cut)
        assert sorted(k for cut in cuts for piece in cut for k in piece) == sorted(keys)


def test_rank_keeps_the_order_of_samples() -> None:
    keys = [(0, n) for n in (4, 2, 9, 7, 1)]
    assert cut_step(keys, 2) == [keys[:2], keys[2:4], keys[4:]]
    assert cut_step(keys, 2, rank=1, world_size=2) == [keys[2:4]]


def test_epochs_and_seeds_have_different_permutations() -> None:
    order = SampleOrder(num_samples=50, samples_per_step=7, seed=0)
    made = [order.permutation(0), order.permutation(1), SampleOrder(50, 7, 1).permutation(0)]
    permutations = [p.tolist() for p in made]
    assert order.permutation(1).tolist() == permutations[1], "the same twice"
    assert len({tuple(p) for p in permutations}) == 3
    assert all(sorted(p) == list(range(50)) for p in permutations)
