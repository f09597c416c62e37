"""Micro-batches made a few at a time: the same ones, and never many seconds ahead."""

import pytest

from eke.training.batches.batches import AT_MOST, LONG_ENOUGH_S, prefetch_in_groups


class Maker:
    """Makes numbers, each of which takes some seconds of its own clock."""

    def __init__(self, count: int, takes_s: float) -> None:
        self.count, self.takes_s = count, takes_s
        self.made = 0
        self.now = 0.0

    def __iter__(self):
        for number in range(self.count):
            self.now += self.takes_s
            self.made += 1
            yield number


@pytest.mark.parametrize("count", [0, 1, AT_MOST, AT_MOST + 1, 5 * AT_MOST + 3])
@pytest.mark.parametrize("takes_s", [0.0, LONG_ENOUGH_S / 2.5, 1.0])
def test_items_arrive_once_in_order(count, takes_s) -> None:
    maker = Maker(count, takes_s)
    assert list(prefetch_in_groups(iter(maker), lambda: maker.now)) == list(range(count))


@pytest.mark.parametrize(
    ("takes_s", "ahead"), [(0.0, AT_MOST), (LONG_ENOUGH_S / 2.5, 3), (1.0, 1)], ids=str
)
def test_slow_items_are_not_prefetched(takes_s, ahead) -> None:
    maker = Maker(100, takes_s)
    items = prefetch_in_groups(iter(maker), lambda: maker.now)
    not_asked_for = []
    for done in range(1, 3 * AT_MOST + 1):
        next(items)
        not_asked_for.append(maker.made - done)
    assert max(not_asked_for) == ahead - 1
