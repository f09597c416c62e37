"""Which configurations nothing else beats in both memory and speed."""

from collections.abc import Sequence

from eke.results.report.compare.measures import PEAK, SAMPLES
from eke.results.report.compare.statistics import estimate
from eke.results.report.compare.variants import Variant


def pareto(variants: Sequence[Variant]) -> list[Variant]:
    """The front of least memory and most samples per second, from little memory to much."""
    points = []
    for each in variants:
        memory, speed = (estimate(each.sample(m.key)) for m in (PEAK, SAMPLES))
        if memory and speed:
            points.append((memory.value, -speed.value, each))
    points.sort(key=lambda point: point[:2])
    front: list[Variant] = []
    best = float("-inf")
    for _, slowness, each in points:
        if -slowness > best:
            best = -slowness
            front.append(each)
    return front
