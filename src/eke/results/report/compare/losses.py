"""Losses and metrics against the baseline's: tested over trainings, in words, with seeds needed.

Settings that change only the order of rounding (checkpointing, a kernel) leave a training as it is:
its rows are one observation of the noise between seeds. The caller says which rows are one training
(`training_key`). Rows of one training share its difference, its interval and its word, but for a
row that stands apart from the others: it is a training of its own.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean
from typing import Generic

import numpy as np

from eke.common.text import format_number
from eke.plan.record import table
from eke.results.report.compare.measures import (
    METRIC,
    best_of,
    is_better_lower,
    keys_by,
    metric_of,
    samples_seen,
)
from eke.results.report.compare.statistics import (
    ALPHA,
    MIN_REPEATS,
    Array,
    Compared,
    Difference,
    K,
    Sample,
    holm_levels,
    mean_difference,
    repeats_to_show,
)
from eke.results.report.compare.variants import Variant

MARGIN = 0.01
"""Increase up to which a loss counts as no worse, relative; a point of accuracy. A choice, stated
in the report."""

EQUAL = 1e-5
"""Relative difference up to which losses count as numerically equivalent: the bound of
tests/equivalence for float32 over 20 steps."""

NAMED = (1.0, 2.0, 3.0, 5.0, 10.0)
"""Differences, in margins (1 %, one point), of which the report says how many seeds show them."""

MANY_SEEDS = 20
"""Seeds that are still proposed, where a larger difference needs fewer."""


class Parity(Enum):
    """A loss or metric relative to the baseline's: better is lower for a loss."""

    baseline = "baseline"
    equal = "equal"
    """Within EQUAL for every seed."""
    within = "within 1 %"
    """The whole interval lies within MARGIN."""
    better = "better"
    """The interval excludes 0."""
    worse = "worse"
    no_worse = "at most 1 % worse"
    """The worse end of the interval lies within MARGIN."""
    undecided = "not decided"
    few = "not compared"
    """Fewer than three seeds, which can only show equality."""
    other = "not comparable"
    """Another training, number of samples, or choice among evaluations: see `why`."""
    unknown = ""
    """Not measured."""


@dataclass(frozen=True)
class LossComparison:
    """Comparison of a configuration's loss, or a metric, with the baseline's."""

    parity: Parity = Parity.unknown
    measure: str = ""
    """Key of the loss or metric that was compared."""
    estimate: float | None = None
    """Difference from the baseline in `unit`; positive is higher, also where lower is better."""
    low: float | None = None
    """Ends of the interval of `1 - level`, at which Holm's method tested it; None if `few`."""
    high: float | None = None
    unit: str = "%"
    """`%` of the baseline's, `points` (hundredths of an accuracy), or empty: the metric's own."""
    seeds: int = 0
    """Seeds in common."""
    level: float = ALPHA
    spread: float | None = None
    """Standard deviation, in `unit`, of the difference of one seed; None if unknown."""
    first_level: float = ALPHA
    """Level of the strictest test of this family: Holm's first."""
    best_of: int = 1
    """Evaluations of which the best by `train.keep_best` was compared; 1: the final ones."""
    margin: float = 100 * MARGIN
    """Of `within` and `no_worse`, in `unit`."""
    why: str = ""
    """Reason of `few`, `other` and `unknown`."""

    @property
    def name(self) -> str:
        """Name of what was compared: `eval loss`, `accuracy, best of 10`."""
        title = metric_of(self.measure).title
        return f"{title}, best of {self.best_of}" if self.best_of > 1 else title

    @property
    def word(self) -> str:
        """What is known, in the direction of the value: `lower`, `at most 1 % higher`."""
        one = "1 point" if self.unit == "points" else "1 %"
        better, worse = "lower", "higher"
        if not is_better_lower(self.measure):
            better, worse = worse, better
        words = {
            Parity.within: f"within {one}",
            Parity.better: better,
            Parity.worse: worse,
            Parity.no_worse: f"at most {one} {worse}",
            Parity.few: f"not compared: {self.why}",
        }
        return words.get(self.parity, self.parity.value)

    @property
    def excludes(self) -> bool:
        """Whether the row cannot be named best: shown worse, by an estimate beyond the margin."""
        return self.parity is Parity.worse and abs(self.estimate or 0.0) > self.margin

    @property
    def change(self) -> str:
        """`+3.1 % (+1.8 to +4.4 %)`; without an interval where there is none."""
        if self.estimate is None:
            return ""
        text = self._with_unit(self.estimate)
        return f"{text} ({self.interval})" if self.interval else text

    @property
    def interval(self) -> str:
        """`-0.6 to +0.8 %`; empty with too few seeds, and for what is equal."""
        if self.low is None or self.high is None:
            return ""
        return self._with_unit(self.low, self.high)

    def _with_unit(self, *values: float) -> str:
        """Values with one number of decimals: of the largest, two digits, in `%` at least one."""
        least = 1e-2 if self.unit else 1e-4
        size = math.floor(math.log10(max(least, *map(abs, values))))
        decimals = max(0 if size else 1, -size + (0 if self.unit else 1), 0)
        text = " to ".join(f"{value:+.{decimals}f}" for value in values)
        return f"{text} {self.unit}".rstrip()

    def seeds_needed(self, difference: float) -> int | None:
        """Seeds that would show a difference (in `unit`) in 9 of 10 cases; None: noise unknown.

        n = 2 (z + 1.28)^2 (noise / difference)^2, with z of Holm's first step.
        """
        if self.spread is None:
            return None
        return math.ceil(repeats_to_show(difference, self.spread, self.first_level))

    @property
    def more_seeds(self) -> tuple[int, float] | None:
        """Number of seeds, more than there are, and the difference that they would show.

        The smallest of NAMED that MANY_SEEDS show, else the one with the fewest; None if unknown.
        """
        sizes = [each * self.margin for each in NAMED if self.margin]
        needed = [(n, size) for size in sizes if (n := self.seeds_needed(size) or 0) > self.seeds]
        few = [each for each in needed if each[0] <= MANY_SEEDS]
        return next(iter(few), needed[-1] if needed else None)


def compare_losses(
    base: Variant,
    variants: Sequence[Variant],
    training_key: Callable[[Variant], Hashable],
    by: str = "",
    level: float = ALPHA,
) -> dict[Variant, LossComparison]:
    """Compare losses, or a metric, of one machine's variants with the baseline's.

    All are one family of Holm's: each other training once, and each unequal row of the baseline's
    own training once.

    Args:
        base: the baseline, which may be among `variants`.
        variants: rows to compare, in any order.
        training_key: the same value for variants whose settings differ only in rounding.
        by: as of `measures.keys_by`: empty for the evaluation loss, else the training loss.
        level: chance of a false claim among all comparisons, as of `holm_levels`.
    """
    found: dict[Variant, LossComparison] = {base: LossComparison(Parity.baseline)}
    families: list[Family[Variant]] = []
    for key in keys_by(by):
        measured = [v for v in variants if v not in found and base.sample(key) and v.sample(key)]
        for each in measured:
            if why := _difference_of_trainings(key, base, each):
                found[each] = LossComparison(Parity.other, key, why=why)
        rows = [base, *(each for each in measured if each not in found)]
        if len(rows) > 1:
            samples = {each: each.sample(key) for each in rows}
            keys = {each: training_key(each) for each in rows}
            families.append(Family(key, samples, keys, level, _evaluated(key, rows)))
            found |= dict.fromkeys(rows[1:], LossComparison())
    levels = holm_levels({k: d for each in families for k, d in each.tests().items()}, level)
    for family in families:
        for each, result in family.results(levels).items():
            best = max(best_of(result.measure, record)[1] for record in base.records)
            found[each] = replace(result, best_of=best)
    why = f"no {by or 'loss'} was measured"
    return {each: found.get(each) or LossComparison(why=why) for each in variants}


def _evaluated(key: str, rows: Sequence[Variant]) -> int:
    """Samples, or tokens, of the smallest evaluation; 0 if unknown."""
    counts = []
    for record in (record for each in rows for record in each.records):
        count = table(record.plan, "steps").get("num_eval_samples") or 0
        length = table(record.plan, "size").get("tokens_per_sample") or 1
        counts.append(int(count * length if key == f"{METRIC}token_accuracy" else count))
    return min(counts, default=0)


def _difference_of_trainings(key: str, base: Variant, other: Variant) -> str:
    """Reason that two losses are not comparable; empty if they are."""
    packed = [each.settings.get("data.packing") == "on" for each in (base, other)]
    if len({*packed}) > 1:
        return "a packed row holds several samples"
    own, its = (fmean([samples_seen(r) or 0 for r in v.records]) for v in (other, base))
    if own != its:
        return f"{own:.0f} samples seen, the baseline {its:.0f}"
    own_best, its_best = ({best_of(key, r) for r in v.records} for v in (other, base))
    if own_best != its_best:
        return f"{_choices(own_best)}, the baseline {_choices(its_best)}"
    return ""


def _choices(found: Iterable[tuple[str, int]]) -> str:
    told = (f"best {name} of {n} evaluations" if n > 1 else "last evaluation" for name, n in found)
    return " or ".join(sorted(told))


POINTS = ("accuracy", "f1_macro", "f1_micro", "token_accuracy")
"""Metrics that are shares: in points, each value rounded to one of the evaluation's samples."""


@dataclass(frozen=True)
class _Scale:
    """How values of one measure are compared, and what is shown of a difference."""

    key: str
    unit: str
    """As of LossComparison; `%` of logarithms, which have a meaning for what is positive."""
    margin: float
    """MARGIN, on the scale of comparison."""
    equal: float
    """EQUAL, likewise."""
    floor: float = 0.0
    """Least variance of one value: that of rounding to one of n samples, 1 / (12 n^2)."""

    @classmethod
    def of(cls, key: str, samples: Sequence[Sample], evaluated: int) -> "_Scale":
        """The scale for some samples, the baseline's first, and the samples of an evaluation."""
        base, *_ = values = [list(sample.values()) for sample in samples]
        size = abs(fmean(base))
        if key.removeprefix(METRIC) in POINTS:
            floor = (100 / evaluated) ** 2 / 12 if evaluated else 0.0
            return cls(key, "points", 100 * MARGIN, 100 * size * EQUAL, floor)
        if is_better_lower(key) and all(value > 0 for each in values for value in each):
            return cls(key, "%", math.log1p(MARGIN), EQUAL)
        return cls(key, "", MARGIN * size, EQUAL * (size or 1.0))

    def convert(self, value: float) -> float:
        """A value on the scale of comparison."""
        if self.unit == "%":
            return math.log(value)
        return 100 * value if self.unit == "points" else value

    def shown(self, difference: float) -> float:
        """A difference in `unit`."""
        return 100 * math.expm1(difference) if self.unit == "%" else difference

    def parity(self, low: float, high: float) -> Parity:
        """What an interval shows."""
        if not is_better_lower(self.key):
            low, high = -high, -low
        if -self.margin <= low and high <= self.margin:
            return Parity.within
        if low > 0:
            return Parity.worse
        if high < 0:
            return Parity.better
        return Parity.no_worse if high <= self.margin else Parity.undecided


class Family(Generic[K]):
    """Comparisons with one baseline in one measure: its trainings, and their tests.

    Args:
        key: of the measure.
        samples: row -> seed -> value, none empty; the first row is the baseline.
        trainings: row -> the same value for rows of one training.
        level: chance of a false claim, as of `holm_levels`.
        evaluated: samples of an evaluation; 0 if unknown.
    """

    def __init__(
        self,
        key: str,
        samples: Mapping[K, Sample],
        trainings: Mapping[K, Hashable],
        level: float = ALPHA,
        evaluated: int = 0,
    ) -> None:
        self._scale = scale = _Scale.of(key, list(samples.values()), evaluated)
        self._level, self._keys = level, trainings
        self._samples = {
            row: {seed: scale.convert(value) for seed, value in sample.items()}
            for row, sample in samples.items()
        }
        self._base, *rows = samples
        self._untested: dict[K, LossComparison] = {}
        groups: dict[Hashable, list[K]] = {trainings[self._base]: [self._base]}
        for row in rows:
            if not self._leaves(row):
                groups.setdefault(trainings[row], []).append(row)
        own, *others = self._split(list(groups.values()))
        means = dict(enumerate(map(self._mean, (own, *others))))
        compared = Compared(means, is_log=False, floor=scale.floor)
        self._tests: list[tuple[list[K], Difference]] = [
            *(([row], self._between(row)) for row in own if row != self._base),
            *((rows, compared.difference((0, n)) or UNKNOWN) for n, rows in enumerate(others, 1)),
        ]

    def tests(self) -> dict[tuple[str, int], Difference]:
        """What Holm's method tests, numbered."""
        return {(self._scale.key, n): found for n, (_, found) in enumerate(self._tests)}

    def results(self, levels: Mapping[tuple[str, int], float]) -> dict[K, LossComparison]:
        """The comparison of each row but the baseline, with the levels at which all were tested."""
        strictest = min(levels.values(), default=self._level)
        tested = {
            row: self._result(found, levels[self._scale.key, n], strictest)
            for n, (rows, found) in enumerate(self._tests)
            for row in rows
        }
        return tested | self._untested

    def _leaves(self, row: K) -> bool:
        """Note what is said of a row without a test; whether it leaves the family for it."""
        base, other, found = self._samples[self._base], self._samples[row], self._between(row)
        changes = [abs(other[seed] - base[seed]) for seed in base if seed in other]
        if changes and max(changes) <= self._scale.equal:
            told = self._result(found, self._level, self._level)
            self._untested[row] = replace(told, parity=Parity.equal, low=None, high=None)
            # Rounded values are equal by chance as well: such a row counts among those tested.
            is_copy = not self._scale.floor or self._keys[row] == self._keys[self._base]
            return is_copy or found.error is None
        if found.error is None:
            why = "one seed" if found.n == 1 else format_number(found.n, "seed")
            self._untested[row] = replace(self._result(found, self._level, self._level), why=why)
        return found.error is None

    def _split(self, groups: Sequence[list[K]]) -> list[list[K]]:
        """Trainings, the baseline's first: rows that stand apart alone, copies as one."""
        number = sum(len(rows) for rows in groups if len(rows) > 1)
        split: list[list[K]] = []
        for rows in groups:
            apart = self._apart(rows, number) if len(rows) > 1 else set()
            rest = [row for row in rows if row not in apart]
            split += [*([row] for row in rows if row in apart), *([rest] if rest else [])]
        split.sort(key=lambda rows: self._base not in rows)
        if self._scale.floor:
            return split
        copies: dict[Hashable, list[K]] = {}
        for rows in split:
            rounded = {s: round(v / self._scale.equal) for s, v in self._mean(rows).items()}
            copies.setdefault(frozenset(rounded.items()), []).extend(rows)
        return list(copies.values())

    def _apart(self, rows: Sequence[K], number: int) -> set[K]:
        """Rows of a training that differ from its others, among `number` such rows in all."""
        shared = [s for s in self._samples[rows[0]] if all(s in self._samples[r] for r in rows)]
        if len(shared) < MIN_REPEATS:
            return set(rows)
        values = np.array([[self._samples[row][seed] for row in rows] for seed in shared])
        apart = set()
        for row, changes in zip(rows, (values - _medians_of_others(values)).T, strict=True):
            found = mean_difference(changes.tolist(), 2 * self._scale.floor)
            is_unequal = found.p is not None and found.p <= self._level / number
            if is_unequal and abs(found.mean) > self._scale.margin:
                apart.add(row)
        return apart

    def _mean(self, rows: Sequence[K]) -> Sample:
        """Mean over a training's rows by seed."""
        samples = [self._samples[row] for row in rows]
        shared = [seed for seed in samples[0] if all(seed in each for each in samples)]
        return {seed: fmean([each[seed] for each in samples]) for seed in shared}

    def _between(self, row: K) -> Difference:
        """The difference of one row from the baseline, by the noise of these two."""
        samples = {0: self._samples[self._base], 1: self._samples[row]}
        compared = Compared(samples, is_log=False, floor=self._scale.floor)
        return compared.difference((0, 1)) or UNKNOWN

    def _result(self, found: Difference, level: float, strictest: float) -> LossComparison:
        ends, scale = found.interval(level), self._scale
        is_relative = scale.unit == "%"
        return LossComparison(
            scale.parity(*ends) if ends else Parity.few,
            scale.key,
            scale.shown(found.mean),
            low=scale.shown(ends[0]) if ends else None,
            high=scale.shown(ends[1]) if ends else None,
            unit=scale.unit,
            seeds=found.n,
            level=level,
            spread=(100 if is_relative else 1) * found.error.spread if found.error else None,
            first_level=strictest,
            margin=100 * MARGIN if is_relative else scale.margin,
        )


def _medians_of_others(values: Array) -> Array:
    """Of each value, the median of the others in its row; two or more columns."""
    ordered, rank = np.sort(values), values.argsort().argsort()
    others = values.shape[-1] - 1
    middle = [
        np.take_along_axis(ordered, place + (rank <= place), -1)
        for place in ((others - 1) // 2, others // 2)
    ]
    medians: Array = (middle[0] + middle[1]) / 2
    return medians


UNKNOWN = Difference(0.0, 0)
"""Of samples that have nothing in common."""
