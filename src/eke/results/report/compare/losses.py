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
    Compared,
    Difference,
    K,
    Sample,
    difference_of,
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

    Args:
        base: the baseline, which may be among `variants`.
        variants: rows to compare, in any order.
        training_key: the same value for variants whose settings differ only in rounding.
        by: as of `measures.keys_by`: empty for the evaluation loss, else the training loss.
        level: chance of a false claim among all comparisons, as of `holm_levels`.
    """
    found: dict[Variant, LossComparison] = {base: LossComparison(Parity.baseline)}
    for key in keys_by(by):
        rows = [v for v in variants if v not in found and base.sample(key) and v.sample(key)]
        whys = {each: _difference_of_trainings(key, base, each) for each in rows}
        found |= {v: LossComparison(Parity.other, key, why=why) for v, why in whys.items() if why}
        rows = [base, *(each for each in rows if not whys[each])]
        samples = {each: each.sample(key) for each in rows}
        trainings = {each: training_key(each) for each in rows}
        results = compare_samples(key, samples, trainings, level, _evaluated(key, rows))
        best = max((best_of(key, record)[1] for record in base.records), default=1)
        found |= {each: replace(result, best_of=best) for each, result in results.items()}
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

    def convert(self, sample: Sample) -> Sample:
        """Values on the scale of comparison."""
        if self.unit == "%":
            return {seed: math.log(value) for seed, value in sample.items()}
        factor = 100 if self.unit == "points" else 1
        return {seed: factor * value for seed, value in sample.items()}

    def is_equal(self, base: Sample, other: Sample) -> bool:
        """Whether all common seeds agree."""
        changes = [abs(other[seed] - base[seed]) for seed in base if seed in other]
        return bool(changes) and max(changes) <= self.equal

    def result(self, found: Difference, level: float, strictest: float) -> LossComparison:
        """A difference as tested at this level, of a family with this strictest one."""
        ends, one = found.interval(level), 100 if self.unit == "%" else 1
        low, high = map(self._shown, ends) if ends else (None, None)
        return LossComparison(
            self._parity(*ends) if ends else Parity.few,
            self.key,
            self._shown(found.mean),
            low,
            high,
            self.unit,
            found.n,
            level,
            one * found.error.spread if found.error else None,
            strictest,
            margin=100 * MARGIN if self.unit == "%" else self.margin,
            why="" if ends else "one seed" if found.n == 1 else format_number(found.n, "seed"),
        )

    def _shown(self, difference: float) -> float:
        return 100 * math.expm1(difference) if self.unit == "%" else difference

    def _parity(self, low: float, high: float) -> Parity:
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


def compare_samples(
    key: str,
    samples: Mapping[K, Sample],
    trainings: Mapping[K, Hashable],
    level: float = ALPHA,
    evaluated: int = 0,
) -> dict[K, LossComparison]:
    """Compare rows in one measure with the first one, as one family of Holm's.

    Each other training is tested once, and each unequal row of the baseline's own training.

    Args:
        key: of the measure.
        samples: row -> seed -> value; the first row is the baseline. All are empty, or none.
        trainings: row -> the same value for rows of one training.
        level: chance of a false claim, as of `holm_levels`.
        evaluated: samples of an evaluation; 0 if unknown.
    """
    base, *rows = samples
    if not rows:
        return {}
    scale = _Scale.of(key, list(samples.values()), evaluated)
    values = {row: scale.convert(sample) for row, sample in samples.items()}
    alone = {row: difference_of(values[base], values[row], 2 * scale.floor) for row in rows}
    equal = {row for row in rows if scale.is_equal(values[base], values[row])}
    groups: dict[Hashable, list[K]] = {trainings[base]: [base]}
    for row in rows:
        # Rounded values are equal by chance as well: such a row counts among those tested.
        is_copy = row in equal and (not scale.floor or trainings[row] == trainings[base])
        if alone[row].error and not is_copy:
            groups.setdefault(trainings[row], []).append(row)
    own, *others = _split(list(groups.values()), values, scale, level)
    means = dict(enumerate(_mean(members, values) for members in (own, *others)))
    compared = Compared(means, is_log=False, floor=scale.floor)
    tested = {row: alone[row] for row in own[1:]}
    for n, members in enumerate(others, 1):
        tested |= dict.fromkeys(members, compared.difference((0, n)) or alone[members[0]])
    # One test for each training: its rows share one difference.
    levels = holm_levels({id(each): each for each in tested.values()}, level)
    strictest = min(levels.values(), default=level)
    found = {}
    for row in rows:
        each = tested.get(row, alone[row])
        found[row] = scale.result(each, levels.get(id(each), level), strictest)
        if row in equal:
            found[row] = replace(found[row], parity=Parity.equal, low=None, high=None)
    return found


def _split(
    groups: Sequence[list[K]], values: Mapping[K, Sample], scale: _Scale, level: float
) -> list[list[K]]:
    """Trainings, the baseline's first: rows that stand apart alone, copies as one."""
    base, number = groups[0][0], sum(len(rows) for rows in groups if len(rows) > 1)
    split: list[list[K]] = []
    for rows in groups:
        apart = _apart(rows, values, scale, level / number) if len(rows) > 1 else set()
        rest = [row for row in rows if row not in apart]
        split += [*([row] for row in rows if row in apart), *([rest] if rest else [])]
    split.sort(key=lambda rows: base not in rows)
    if scale.floor:
        return split
    copies: dict[Hashable, list[K]] = {}
    for rows in split:
        rounded = {s: round(v / scale.equal) for s, v in _mean(rows, values).items()}
        copies.setdefault(frozenset(rounded.items()), []).extend(rows)
    return list(copies.values())


def _apart(rows: Sequence[K], samples: Mapping[K, Sample], scale: _Scale, level: float) -> set[K]:
    """Rows of a training that differ from the median of its others."""
    shared = [seed for seed in samples[rows[0]] if all(seed in samples[row] for row in rows)]
    if len(shared) < MIN_REPEATS:
        return set(rows)
    values = np.array([[samples[row][seed] for row in rows] for seed in shared])
    ordered, rank, others = np.sort(values), values.argsort().argsort(), len(rows) - 1
    low, high = (
        np.take_along_axis(ordered, place + (rank <= place), -1)
        for place in ((others - 1) // 2, others // 2)
    )
    found = [mean_difference(c, 2 * scale.floor) for c in (values - (low + high) / 2).T.tolist()]
    is_apart = [(d.p or 0.0) <= level and abs(d.mean) > scale.margin for d in found]
    return {row for row, is_one in zip(rows, is_apart, strict=True) if is_one}


def _mean(rows: Sequence[K], samples: Mapping[K, Sample]) -> Sample:
    """Mean over a training's rows by seed."""
    shared = [seed for seed in samples[rows[0]] if all(seed in samples[row] for row in rows)]
    return {seed: fmean([samples[row][seed] for row in rows]) for seed in shared}
