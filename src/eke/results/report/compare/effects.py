"""Effects of single techniques, of matched pairs and ladders, Pareto front, published tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eke.results.report.compare.measures import PEAK, SAMPLE_SPEED, Measure
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

_Pairs = Sequence[tuple[Variant, Variant]]


@dataclass(frozen=True)
class Effect:
    """Effect of one value of a factor relative to the baseline's, all else equal."""

    factor: str
    value: str
    reference: str
    pairs: int
    """Number of pairs that differ only in this factor."""
    ratios: Mapping[str, Ratio]
    """Measure -> geometric mean over the pairs. With fewer than three pairs, the interval is the
    interval of their repeats and does not generalize to other pairs."""


@dataclass(frozen=True)
class PairTests:
    """Tests of pairs of one machine's variants, as in the report's table."""

    noise: Mapping[str, Compared]
    base: Variant
    rows: Mapping[Variant, Mapping[str, Ratio]]
    """Tested ratios of variants to the baseline."""
    level: float = ALPHA
    """As of `holm_levels`."""

    def ratios(self, groups: Sequence[_Pairs]) -> list[dict[str, Ratio]]:
        """Return the ratios over each group's pairs. Groups that are not table rows are a family.

        A comparison has one interval wherever it is shown.
        """
        known = [
            self.rows.get(pairs[0][1]) if len(pairs) == 1 and pairs[0][0] is self.base else None
            for pairs in groups
        ]
        pairs_of = zip(groups, known, strict=True)
        rest = [self._mean_differences(pairs) if row is None else {} for pairs, row in pairs_of]
        return [
            each if row is None else {key: row[key] for key in self.noise if key in row}
            for row, each in zip(known, correct_all(rest, self.level), strict=True)
        ]

    def _mean_differences(self, pairs: _Pairs) -> dict[str, Difference]:
        """Return the mean difference of some pairs in each measure."""
        effects: dict[str, Difference | None] = {}
        for key, compared in self.noise.items():
            measured = [(a, b) for a, b in pairs if a.sample(key) and b.sample(key)]
            effects[key] = compared.difference(*measured)
            if len(measured) >= MIN_REPEATS:  # the interval includes the variation between pairs
                found = [compared.difference(pair) for pair in measured]
                effects[key] = mean_difference([each.mean for each in found if each])
        return {key: each for key, each in effects.items() if each}


def main_effects(
    variants: Sequence[Variant], keys: Sequence[str], tests: PairTests
) -> list[Effect]:
    """Return the effect of each value of each factor, among one machine's successful variants."""
    found: dict[tuple[str, str, str], _Pairs] = {}
    for key in keys:
        # Group the variants that differ only in this factor, by its value.
        others: dict[tuple[tuple[str, str], ...], dict[str, Variant]] = {}
        for each in variants:
            for rest in _shared_settings(each, key):
                others.setdefault(rest, {})[each.factors.get(key, "")] = each
        reference = tests.base.factors.get(key, "")
        for value in dict.fromkeys(each.factors.get(key, "") for each in variants):
            # Pair the value with the baseline's value in each group that has both.
            both = [g for g in others.values() if {reference, value} <= set(g)]
            pairs = list(dict.fromkeys((g[reference], g[value]) for g in both))
            if value != reference and pairs:
                found[key, value, reference] = pairs
    tested = zip(found.items(), tests.ratios(list(found.values())), strict=True)
    return [Effect(*each, len(pairs), ratios) for (each, pairs), ratios in tested]


def _shared_settings(each: Variant, key: str) -> list[tuple[tuple[str, str], ...]]:
    """Return settings that a pair must share: other factors, with or without implied ones."""
    others = [(k, v) for k, v in each.factors.items() if k != key]
    typed = [(k, v) for k, v in others if k not in each.implied or not k.startswith(f"{key}.")]
    return list(dict.fromkeys((tuple(others), tuple(typed))))


def single_factor_variants(base: Variant, variants: Sequence[Variant]) -> list[tuple[Variant, str]]:
    """Return the variants that differ from the baseline in one factor, with that factor."""
    found = [(each, _changed(base, each)) for each in variants]
    return [(each, _text(change)) for each, change in found if len(change) == 1]


def cumulative_variants(base: Variant, variants: Sequence[Variant]) -> list[tuple[Variant, str]]:
    """Return the longest chain in which each variant adds settings to the previous one.

    Each variant has the added settings. Empty with fewer than two variants.
    """
    if len(variants) > 1000:  # quadratic time
        return []
    changes = [(each, change) for each in variants if (change := _changed(base, each))]
    changes.sort(key=lambda each: len(each[1]))
    best: list[list[int]] = []
    for number, (_, change) in enumerate(changes):
        below = [
            best[n] for n in range(number)
            if len(changes[n][1]) < len(change) and changes[n][1].items() <= change.items()
        ]  # fmt: skip
        best.append([*max(below, key=len, default=[]), number])
    chain = [changes[number] for number in max(best, key=len, default=[])]
    if len(chain) < 2:
        return []
    earlier = [{}, *(change for _, change in chain)]
    return [
        (variant, _text({k: v for k, v in change.items() if k not in before}))
        for (variant, change), before in zip(chain, earlier, strict=False)
    ]


def _changed(base: Variant, other: Variant) -> dict[str, str]:
    """Return factors that differ from the baseline's, without defaults of another option."""
    different = {k: v for k, v in other.factors.items() if v != base.factors.get(k, "")}
    brought = {key for key in base.implied & other.implied if key.split(".")[0] in different}
    return {key: value for key, value in different.items() if key not in brought}


def _text(change: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in change.items())


SAME_BYTES = 0.001
"""Relative difference up to which memories count as equal: allocators round."""


def pareto(variants: Sequence[Variant], measure: Measure, noise: Compared) -> list[Variant]:
    """Return variants that no other beats in memory or speed without being worse in the other.

    By increasing memory. Speeds are equal within SAME, or if the repeats do not resolve the
    difference. Variants with too few repeats are compared by their values. `noise` has the
    comparisons in the speed `measure`.
    """
    points: dict[Variant, tuple[float, float]] = {}
    for each in variants:
        memory, speed = (estimate(each.sample(m.key)) for m in (PEAK, measure))
        if memory and speed:
            points[each] = memory.value, speed.value

    def needs_more(one: Variant, other: Variant) -> bool:
        return points[one][0] > points[other][0] * (1 + SAME_BYTES)

    def is_faster(one: Variant, other: Variant) -> bool:
        if points[one][1] <= points[other][1] * (1 + SAME):
            return False
        found = noise.difference((other, one))
        return found is None or found.p is None or found.p <= ALPHA / len(variants)

    def beats(one: Variant, other: Variant) -> bool:
        if needs_more(one, other) or is_faster(other, one):
            return False
        return needs_more(other, one) or is_faster(one, other)

    front: list[Variant] = []
    for each in sorted(points, key=lambda v: (points[v][0], -points[v][1])):
        if not any(beats(other, each) for other in reversed(front)):
            front = [other for other in front if not beats(each, other)] + [each]
    return front


@dataclass(frozen=True)
class _PublishedRow:
    """One row of a sweep relative to the baseline: ratios of SAMPLES and PEAK."""

    row: str
    measured: Mapping[str, Ratio]
    published: Mapping[str, float | None]


@dataclass(frozen=True)
class PublishedMatch:
    """Published table with the measured numbers of the same rows."""

    table: PublishedTable
    rows: tuple[_PublishedRow, ...]


def match_published(
    sweeps: Sequence[str], variants: Sequence[Variant], tests: PairTests
) -> list[PublishedMatch]:
    """Return published tables of which one machine measured the baseline and another row."""
    by_row = {row: v for v in variants if v.records for row in v.rows}
    found = []
    for table in (t for sweep in sweeps for t in all_published() if t.sweep == sweep):
        base = by_row.get(table.baseline)
        others = [row for row in table.rows if row != table.baseline and row in by_row]
        if base is not None and others:
            measured = tests.ratios([[(base, by_row[row])] for row in others])
            rows = (
                _PublishedRow(row, own, _published(table.rows[row], table.rows[table.baseline]))
                for row, own in zip(others, measured, strict=True)
            )
            found.append(PublishedMatch(table, tuple(rows)))
    return found


def _published(there: Figures, before: Figures) -> dict[str, float | None]:
    """Return the published speed and memory over the baseline's, None without both figures."""
    memory = None
    if there.peak_memory_mb and before.peak_memory_mb:
        memory = there.peak_memory_mb / before.peak_memory_mb
    speed = None if there.diff_frac is None else 1 + there.diff_frac
    if there.samples_per_s and before.samples_per_s:
        speed = there.samples_per_s / before.samples_per_s
    elif before.runtime_s and there.runtime_s:
        speed = before.runtime_s / there.runtime_s
    return {SAMPLE_SPEED.key: speed, PEAK.key: memory}
