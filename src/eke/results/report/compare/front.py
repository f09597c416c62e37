"""Pareto front of memory and speed, by what is shown to differ."""

from collections.abc import Sequence
from dataclasses import dataclass

from eke.results.report.compare.measures import PEAK, Measure
from eke.results.report.compare.statistics import ALPHA, SAME, Compared, estimate
from eke.results.report.compare.variants import Variant

SAME_BYTES = 0.001
"""Memories count as equal within it: means of logarithms and allocators round."""


def pareto(variants: Sequence[Variant], measure: Measure, noise: Compared) -> list[Variant]:
    """Variants that no other beats in memory or speed without being worse in the other.

    By increasing memory. Speeds are equal within SAME, or if the repeats do not resolve the
    difference. Those with too few repeats are compared by their values.

    Args:
        variants: of one group and machine.
        measure: the speed.
        noise: comparisons in that speed.
    """
    points = []
    for each in variants:
        memory, speed = (estimate(each.sample(m.key)) for m in (PEAK, measure))
        if memory and speed:
            points.append(_Point(each, memory.value, speed.value, noise, ALPHA / len(variants)))
    front: list[_Point] = []
    for point in sorted(points, key=lambda point: (point.memory, -point.speed)):
        if not any(other.beats(point) for other in reversed(front)):
            front = [other for other in front if not point.beats(other)] + [point]
    return [point.variant for point in front]


@dataclass(frozen=True, eq=False)
class _Point:
    variant: Variant
    memory: float
    speed: float
    noise: Compared
    level: float

    def beats(self, other: "_Point") -> bool:
        if self.memory > other.memory * (1 + SAME_BYTES) or other._is_faster(self):
            return False
        return other.memory > self.memory * (1 + SAME_BYTES) or self._is_faster(other)

    def _is_faster(self, other: "_Point") -> bool:
        if self.speed <= other.speed * (1 + SAME):
            return False
        found = self.noise.difference((other.variant, self.variant))
        return found is None or found.p is None or found.p <= self.level
