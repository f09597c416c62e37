"""Effects of techniques: over matched pairs, alone, cumulative, Pareto front, published tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from eke.results.report.compare.measures import PEAK, SAMPLES, Measure
from eke.results.report.compare.statistics import (
    ALPHA,
    MIN_REPEATS,
    SAME,
    Compared,
    Difference,
    Ratio,
    correct_all,
    estimate,
    mean_difference,
)
from eke.results.report.compare.variants import Variant
from eke.results.report.published import Figures, PublishedTable, all_published

MAX_VARIANTS = 1000
"""Limit for ladders: finding the longest one takes quadratic time."""


@dataclass(frozen=True)
class Effect:
    """Effect of one value of a factor relative to the baseline's, all else equal."""

    factor: str
    value: str
    reference: str
    pairs: int
    """Number of pairs that differ in nothing else."""
    ratios: Mapping[str, Ratio]
    """Measure -> geometric mean over the pairs. With fewer than three pairs the interval is that
    of their repeats and does not generalize to other pairs."""


@dataclass(frozen=True)
class PairTests:
    """How pairs of one machine's variants are tested: with the baseline, as the report's table."""

    noise: Mapping[str, Compared]
    """By measure."""
    base: Variant
    rows: Mapping[Variant, Mapping[str, Ratio]]
    """Tested ratios of variants to the baseline."""
    level: float = ALPHA
    """As of `holm_levels`."""

    def ratios(self, groups: Sequence[Sequence[tuple[Variant, Variant]]]) -> list[dict[str, Ratio]]:
        """The ratio over each group's pairs in each measure; those not in the table are a family.

        A comparison has one interval wherever it is shown.
        """
        known = [
            self.rows.get(pairs[0][1]) if len(pairs) == 1 and pairs[0][0] is self.base else None
            for pairs in groups
        ]
        rest = [
            _over(pairs, self.noise) if row is None else {}
            for pairs, row in zip(groups, known, strict=True)
        ]
        tested = zip(known, correct_all(rest, self.level), strict=True)
        return [
            each if row is None else {key: row[key] for key in self.noise if key in row}
            for row, each in tested
        ]


def main_effects(
    variants: Sequence[Variant], keys: Sequence[str], tests: PairTests
) -> list[Effect]:
    """Effects of every factor's values among one machine's successful variants."""
    effects, groups = [], []
    for key in keys:
        others: dict[tuple[tuple[str, str], ...], dict[str, Variant]] = {}
        for each in variants:
            for rest in _rests(each, key):
                others.setdefault(rest, {})[each.factors.get(key, "")] = each
        reference = tests.base.factors.get(key, "")
        values = dict.fromkeys(each.factors.get(key, "") for each in variants)
        for value in values:
            both = [g for g in others.values() if {reference, value} <= set(g)]
            pairs = list(dict.fromkeys((g[reference], g[value]) for g in both))
            if value != reference and pairs:
                effects.append(Effect(key, value, reference, len(pairs), {}))
                groups.append(pairs)
    ratios = tests.ratios(groups)
    return [replace(effect, ratios=each) for effect, each in zip(effects, ratios, strict=True)]


def _rests(each: Variant, key: str) -> list[tuple[tuple[str, str], ...]]:
    """Settings that a pair must share: all other factors, with or without options' defaults."""
    others = [(k, v) for k, v in each.factors.items() if k != key]
    typed = [(k, v) for k, v in others if k not in each.implied or not k.startswith(f"{key}.")]
    return list(dict.fromkeys((tuple(others), tuple(typed))))


def alone(base: Variant, variants: Sequence[Variant]) -> list[tuple[Variant, str]]:
    """Variants that differ from the baseline in one factor, with that factor."""
    found = [(each, changed(base, each)) for each in variants]
    return [(each, _tell(change)) for each, change in found if len(change) == 1]


def ladder(base: Variant, variants: Sequence[Variant]) -> list[tuple[Variant, str]]:
    """The longest chain from the baseline in which each variant adds settings to the previous one.

    With these settings. Empty with fewer than two variants, which `alone` shows already.
    """
    if len(variants) > MAX_VARIANTS:
        return []
    changes = [(each, changed(base, each)) for each in variants]
    changes = sorted((c for c in changes if c[1]), key=lambda c: len(c[1]))
    best: list[list[int]] = []
    for number, (_, change) in enumerate(changes):
        below = [
            best[n] for n in range(number)
            if len(changes[n][1]) < len(change) and changes[n][1].items() <= change.items()
        ]  # fmt: skip
        best.append([*max(below, key=len, default=[]), number])
    chain = max(best, key=len, default=[])
    if len(chain) < 2:
        return []
    rungs, before = [], {}
    for number in chain:
        variant, change = changes[number]
        added = {k: v for k, v in change.items() if k not in before}
        rungs.append((variant, _tell(added)))
        before = change
    return rungs


def changed(base: Variant, other: Variant) -> dict[str, str]:
    """Factors that differ from the baseline's, without defaults of another option."""
    different = {k: v for k, v in other.factors.items() if v != base.factors.get(k, "")}
    brought = {key for key in base.implied & other.implied if key.split(".")[0] in different}
    return {key: value for key, value in different.items() if key not in brought}


def _tell(change: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in change.items())


def _over(
    pairs: Sequence[tuple[Variant, Variant]], noise: Mapping[str, Compared]
) -> dict[str, Difference]:
    effects: dict[str, Difference | None] = {}
    for key, compared in noise.items():
        named = [(a, b) for a, b in pairs if a.sample(key) and b.sample(key)]
        if len(named) < MIN_REPEATS:
            effects[key] = compared.difference(*named)
        else:  # the interval includes the variation between pairs
            found = [compared.difference(pair) for pair in named]
            effects[key] = mean_difference([each.mean for each in found if each])
    return {key: each for key, each in effects.items() if each}


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


@dataclass(frozen=True)
class PublishedRow:
    """One row of a sweep relative to the baseline: ratios of SAMPLES and PEAK."""

    row: str
    measured: Mapping[str, Ratio]
    published: Mapping[str, float | None]


@dataclass(frozen=True)
class PublishedMatch:
    """A published table with the measured numbers of the same rows."""

    table: PublishedTable
    rows: tuple[PublishedRow, ...]


def match_published(
    sweeps: Sequence[str], variants: Sequence[Variant], tests: PairTests
) -> list[PublishedMatch]:
    """Published tables whose baseline and at least one other row one machine measured."""
    by_row = {row: v for v in variants if v.records for row in v.rows}
    found = []
    for table in (t for sweep in sweeps for t in all_published() if t.sweep == sweep):
        base = by_row.get(table.baseline)
        others = [row for row in table.rows if row != table.baseline and row in by_row]
        if base is not None and others:
            measured = tests.ratios([[(base, by_row[row])] for row in others])
            rows = []
            for row, own in zip(others, measured, strict=True):
                told = _published_ratios(table.rows[row], table.rows[table.baseline])
                rows.append(PublishedRow(row, own, told))
            found.append(PublishedMatch(table, tuple(rows)))
    return found


def _published_ratios(there: Figures, before: Figures) -> dict[str, float | None]:
    """Speed, from the first figure published for both, and memory relative to the baseline."""
    memory = None
    if there.peak_memory_mb and before.peak_memory_mb:
        memory = there.peak_memory_mb / before.peak_memory_mb
    speed = None if there.diff_frac is None else 1 + there.diff_frac
    if there.samples_per_s and before.samples_per_s:
        speed = there.samples_per_s / before.samples_per_s
    elif before.runtime_s and there.runtime_s:
        speed = before.runtime_s / there.runtime_s
    return {SAMPLES.key: speed, PEAK.key: memory}
