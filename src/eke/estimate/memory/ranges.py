"""Arithmetic of low, expected and high."""

from collections.abc import Iterable

from eke.estimate.memory.values import Range

NOTHING = Range(0, 0, 0)


def exact(number: int) -> Range:
    """What is known to the byte."""
    return Range(number, number, number)


def spread(low: int, expected: int, high: int) -> Range:
    """A range around the expected value: ends that formulas put on its wrong side are on it."""
    expected = max(0, expected)
    return Range(max(0, min(low, expected)), expected, max(expected, high))


def total(ranges: Iterable[Range]) -> Range:
    """The sum: of low ends, of expected values and of high ends."""
    low = expected = high = 0
    for each in ranges:
        low, expected, high = low + each.low, expected + each.expected, high + each.high
    return Range(low, expected, high)
