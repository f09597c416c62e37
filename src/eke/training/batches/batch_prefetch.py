"""Micro-batches made a few at a time, where the training process makes them itself."""

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

AT_MOST = 8
"""Items of a burst."""
LONG_ENOUGH_S = 1e-3
"""Seconds after which a burst ends: as long as no step's time shows it, and by then all is warm."""


def in_bursts(items: Iterator[T], clock: Callable[[], float] = time.perf_counter) -> Iterator[T]:
    """The same items, of which several are made before the first is handed on.

    What makes a batch is out of the processor's caches after each step of a model, and making one
    then takes several times as long as the next one after it (0.36 ms a step one by one, 0.05 eight
    at a time, for four short samples: docs/lab.md, 2026-11-23).

    Args:
        items: made when they are asked for.
        clock: seconds that have passed.
    """
    while True:
        made, start = [], clock()
        for item in items:
            made.append(item)
            if len(made) == AT_MOST or clock() - start >= LONG_ENOUGH_S:
                break
        if not made:
            return
        yield from made
