"""The models of memory allocators, request by request."""

from random import Random

import pytest

from eke.training.trace.allocator_model import MIB, CachingAllocator, PlainSum
from eke.training.trace.trace import ACTIVATIONS, WEIGHTS, History, replay


def held(*sizes: int) -> CachingAllocator:
    allocator = CachingAllocator()
    for key, size in enumerate(sizes):
        allocator.malloc(key, size)
    return allocator


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # What is left of a segment stays with the block unless it is over 1 MiB.
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB - MIB + 512 - MIB, 12 * MIB),
        (19 * MIB + 1, 20 * MIB, 20 * MIB),
    ],
)
def test_single_allocation(size, allocated, reserved) -> None:
    allocator = held(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_small_requests_share_a_segment_until_it_is_full() -> None:
    assert held(*[MIB] * 2).reserved == 2 * MIB
    assert held(*[MIB] * 3).reserved == 4 * MIB
    assert held(*[512] * 4096).reserved == 2 * MIB


def test_small_and_large_blocks_are_separate() -> None:
    allocator = held(2 * MIB)
    allocator.malloc(9, 512)
    assert allocator.reserved == 22 * MIB


def test_smallest_fitting_block_is_used() -> None:
    allocator = held(40 * MIB, 30 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.malloc(2, 30 * MIB)
    allocator.malloc(3, 40 * MIB)
    assert allocator.reserved == 70 * MIB, "the other way round there would be no room for 40"


def test_free_neighbours_are_merged() -> None:
    allocator = held(5 * MIB, 5 * MIB, 5 * MIB)
    for key in (0, 2, 1):
        allocator.free(key)
    allocator.malloc(3, 20 * MIB)
    assert allocator.reserved == 20 * MIB


def test_fragments_are_not_reused() -> None:
    allocator = held(*[6 * MIB] * 6)
    for key in (0, 2, 4):
        allocator.free(key)
    before = allocator.reserved
    allocator.malloc(9, 12 * MIB)
    assert allocator.reserved == before + 12 * MIB


def test_only_empty_segments_are_released() -> None:
    allocator = held(30 * MIB, 5 * MIB)
    allocator.free(0)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    allocator.free(1)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.allocated) == (0, 0)


def test_random_allocations_keep_all_bytes_accounted() -> None:
    rng, allocator, alive = Random(3), CachingAllocator(), {}
    for key in range(4000):
        if alive and rng.random() < 0.48:
            key = rng.choice(list(alive))
            allocator.free(key)
            del alive[key]
            continue
        size = int(10 ** rng.uniform(0, 8))
        allocator.malloc(key, size)
        alive[key] = size
        assert sum(alive.values()) <= allocator.allocated <= allocator.reserved
    for key in list(alive):
        allocator.free(key)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


def test_history_is_replayed_by_phase() -> None:
    history = History()
    history.begin("load")
    weight = history.born(1000, WEIGHTS)
    history.begin("forward")
    history.born(500, ACTIVATIONS)
    start = len(history.events)
    short = history.born(300, ACTIVATIONS)
    history.died(short, 300)
    history.born(1, ACTIVATIONS)
    history.repeat(start, len(history.events))  # what stayed is not there twice
    history.begin("optimizer")
    history.died(weight, 1000)
    peaks = replay(history, PlainSum())
    assert peaks.allocated == {"load": 1000, "forward": 1801, "optimizer": 1501}
    assert peaks.components == {WEIGHTS: 1000, ACTIVATIONS: 801}
    assert replay(history, CachingAllocator()).reserved["optimizer"] == 2 * MIB


def test_unnamed_phase_is_not_counted() -> None:
    history = History()
    history.begin("")
    first = history.born(5000, ACTIVATIONS)
    history.died(first, 5000)
    history.begin("forward")
    history.born(10, ACTIVATIONS)
    peaks = replay(history, PlainSum())
    assert peaks.allocated == {"forward": 10}
    assert peaks.components == {ACTIVATIONS: 10}
