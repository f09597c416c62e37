"""Which sample of which source comes at which step of a mix."""

from collections import Counter

import numpy as np
import pytest

from eke.data.sources import MixtureSampler
from eke.training.batches.batches import SampleOrder

SIZES, SHARES = (40, 7, 300), (0.6, 0.3, 0.1)
MIX = MixtureSampler(SIZES, SHARES, 5)
ENDS = np.cumsum(SIZES)


def order(draws: MixtureSampler = MIX, count: int = 347, per_step: int = 8, **more) -> SampleOrder:
    return SampleOrder(count, per_step, draws.seed, mix=draws, **more)


def sources(keys) -> list[int]:
    return np.searchsorted(ENDS, [number for _, number in keys], side="right").tolist()


def keys_of(made: SampleOrder, start: int, stop: int) -> list[tuple[int, int]]:
    return [key for step in made.steps(start, stop) for key in step]


@pytest.mark.parametrize("width", [8, 50, 347, 3000])
def test_every_window_has_the_configured_shares(width) -> None:
    found = sources(keys_of(order(), 0, 1000))
    for start in range(0, len(found) - width, 97):
        counts = Counter(found[start : start + width])
        for source, share in enumerate(SHARES):
            assert abs(counts[source] - width * share) <= len(SHARES)


def test_small_share_is_drawn_at_its_rate() -> None:
    draws = MixtureSampler((10, 5), (0.999, 0.001), 0)
    found = Counter(key[1] >= 10 for key in keys_of(order(draws, 15, 4), 0, 3000))
    assert abs(found[True] - found.total() / 1000) <= 1


def test_draws_depend_on_seed_and_step() -> None:
    whole = list(order().steps(0, 200))
    assert list(order().steps(0, 200)) == whole
    for start in (1, 43, 44, 45, 130):
        assert list(order().steps(start, 200)) == whole[start:]
    assert list(order(MixtureSampler(SIZES, SHARES, 6)).steps(0, 200)) != whole


def test_draws_are_independent_of_the_start() -> None:
    epochs, numbers = MIX.take(0, 5000)
    for first in (0, 1, 2, 3, 999, 4321):
        part = MIX.take(first, 500)
        assert part[0].tolist() == epochs[first : first + 500].tolist()
        assert part[1].tolist() == numbers[first : first + 500].tolist()


@pytest.mark.parametrize("source", range(3))
def test_source_is_reshuffled_after_each_pass(source) -> None:
    first = (0, *ENDS)[source]
    keys = [k for k in keys_of(order(), 0, 1500) if first <= k[1] < ENDS[source]]
    size = SIZES[source]
    rounds = [keys[at : at + size] for at in range(0, len(keys) - size, size)]
    assert len(rounds) >= 2
    for number, each in enumerate(rounds):
        assert {epoch for epoch, _ in each} == {number}
        assert sorted(n - first for _, n in each) == list(range(size))
    assert [n for _, n in rounds[0]] != [n for _, n in rounds[1]]


def test_keys_are_unique() -> None:
    """Masks are drawn by it."""
    keys = keys_of(order(), 0, 3000)
    assert len(set(keys)) == len(keys)


def test_unweighted_epoch_draws_each_sample_once() -> None:
    draws = MixtureSampler(SIZES, tuple(size / 347 for size in SIZES), 1)
    for epoch in range(20):
        epochs, numbers = order(draws).keys(epoch)
        assert set(epochs.tolist()) == {epoch}
        assert sorted(numbers.tolist()) == list(range(347))


def test_stream_numbers_continue_across_blocks(monkeypatch) -> None:
    draws = MixtureSampler(SIZES, SHARES, 5, (False, True, False))
    made = order(draws, 300, is_stream=True)
    whole = keys_of(made, 0, 200)
    rows = [epoch * 7 + n - 40 for epoch, n in whole if 40 <= n < 47]
    assert rows == list(range(len(rows)))
    assert sources(whole) == sources(keys_of(order(count=300), 0, 200))
    monkeypatch.setattr("eke.training.batches.batches._SAMPLES_AT_ONCE", 1)
    short = order(MixtureSampler((4, 7, 9), SHARES, 5, draws.streams), 300, is_stream=True)
    again = [key for step in range(200) for key in keys_of(short, step, step + 1)]
    assert keys_of(short, 0, 200) == again


def test_samples_of_similar_length_share_a_step() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 347)
    plain, grouped = order(), order(lengths=lengths)
    assert Counter(keys_of(plain, 0, 44)) == Counter(keys_of(grouped, 0, 44))
    assert list(grouped.steps(60, 90)) == list(grouped.steps(0, 90))[60:]

    def spread(made: SampleOrder) -> float:
        each = (lengths[[n for _, n in keys]] for keys in made.steps(0, 43))
        return float(np.mean([found.max() - found.min() for found in each]))

    assert spread(grouped) < spread(plain) / 5
