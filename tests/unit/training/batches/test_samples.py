"""Samples by number: the same for whoever asks, in whatever order."""

import dataclasses

import numpy as np
import pytest
import torch

from eke.common.text import BOS, NUM_SPECIAL_TOKENS
from eke.config.schema import Lengths, Synthetic
from eke.data.sources import FileRange, mix_seed
from eke.training.batches.sampler import RandomTokens, pack_windows


def random_tokens(**changes):
    data = Synthetic(seq_len=32, **changes)
    return RandomTokens(data, length=32, vocab_size=1000, num_labels=3, count=200, split=0)


def test_tokens_are_within_limits_and_vocabulary() -> None:
    source = random_tokens(min_token=100, max_token=120)
    for each, most in ((source, 120), (dataclasses.replace(source, vocab_size=110), 110)):
        tokens = np.concatenate([each.row(index).tokens for index in range(50)])
        assert tokens.dtype == np.int64
        assert set(tokens.tolist()) == set(range(100, most)), "every id, and no other"


def test_samples_depend_only_on_their_index() -> None:
    source = random_tokens()
    forwards = [source.row(index).tokens.tolist() for index in range(5)]
    torch.manual_seed(99)
    backwards = [source.row(index).tokens.tolist() for index in reversed(range(5))]
    assert forwards == backwards[::-1]
    assert len({tuple(tokens) for tokens in forwards}) == 5


@pytest.mark.parametrize("other", [{"split": 1}, {"data": Synthetic(seq_len=32, data_seed=1)}],
                         ids=["evaluation", "data seed"])  # fmt: skip
def test_splits_and_seeds_have_different_samples(other) -> None:
    source = random_tokens()
    changed = dataclasses.replace(source, **other)
    assert not np.array_equal(source.row(0).tokens, changed.row(0).tokens)


@pytest.mark.parametrize(("min_len", "shortest"), [(None, 16), (30, 30), (2, 2)], ids=str)
def test_uniform_lengths_reach_both_limits(min_len, shortest) -> None:
    source = random_tokens(lengths=Lengths.uniform, min_len=min_len)
    lengths = [len(source.row(index).tokens) for index in range(200)]
    assert (min(lengths), max(lengths)) == (shortest, 32)


def test_labels_are_spread_over_the_classes() -> None:
    """The guides' randint(0, 1) gives class 0 only."""
    source = random_tokens()
    labels = [source.label(index) for index in range(200)]
    counts = [labels.count(label) for label in range(3)]
    assert sum(counts) == 200
    assert min(counts) > 40, "a third of 200 each, five standard deviations below"


def test_seeds_are_mixed() -> None:
    seeds = {mix_seed(a, b) for a in range(50) for b in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix_seed(1, 23) != mix_seed(12, 3)


@pytest.fixture
def pieces(tmp_path):
    made = []
    for name, text, label in (("1", "abcde", "x"), ("2", "fg", "y"), ("3", "hijkl", "x")):
        (tmp_path / name).write_text(text)
        made.append(FileRange(tmp_path / name, 0, len(text), label))
    return tuple(made)


def coded(text: str) -> list[int]:
    """`|` is the separator after each piece."""
    return [BOS if c == "|" else ord(c) + NUM_SPECIAL_TOKENS for c in text]


def test_full_windows_are_packed_class_by_class(pieces) -> None:
    for length, texts in ((3, ["abc", "de|", "hij", "kl|", "fg|"]), (5, ["abcde", "|hijk"])):
        windows = pack_windows(pieces, length, ["x", "y"])
        found = [windows.row(index).tokens.tolist() for index in range(len(windows))]
        assert found == list(map(coded, texts))
        labels = [windows.label(index) for index in range(len(windows))]
        assert labels == [int(text.startswith("f")) for text in texts]


@pytest.mark.parametrize(
    ("keep", "starts"),
    [(None, "adhkf"), (5, "adhkf"), (9, "adhkf"), (2, "ah"), (1, "a")],
    ids=["all", "exactly", "more", "two", "one"],
)
def test_kept_windows_are_spread_over_the_text(keep, starts, pieces) -> None:
    windows = pack_windows(pieces, 3, ["x", "y"], keep)
    found = [windows.row(index).tokens[0].item() for index in range(len(windows))]
    assert found == coded(starts)
