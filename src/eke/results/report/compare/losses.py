"""Losses and metrics against the baseline's: tests over trainings, words, and seeds needed.

Rows that differ only in rounding (checkpointing, a kernel) are one training: one observation of the
noise between seeds, with one difference, interval and word. A row that differs from the others of
its training is a training of its own.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
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
from eke.results.report.compare.variants import Variant, training_key

_MARGIN = 0.01
"""Increase up to which a loss counts as no worse: relative, or a point of accuracy. A choice,
stated in the report."""

_EQUAL = 1e-5
"""Relative difference up to which losses count as equal: the bound of tests/equivalence for float32
over 20 steps."""

MANY_SEEDS = 20
"""Seeds up to which a smaller difference is preferred for this."""


class Parity(Enum):
    """Loss or metric relative to the baseline's: better is lower for a loss."""

    baseline = "baseline"
    equal = "equal"  # within EQUAL for every seed
    within = "within 1 %"  # the whole interval lies within MARGIN
    better = "better"  # the interval excludes 0
    worse = "worse"
    no_worse = "at most 1 % worse"  # the worse end of the interval lies within MARGIN
    undecided = "not decided"
    few = "not compared"  # fewer than three seeds, which can only show equality
    other = "not comparable"  # packing, number of samples, or choice among evaluations differ
    unknown = ""  # not measured


@dataclass(frozen=True)
class LossComparison:
    """Comparison of a configuration's loss, or a metric, with the baseline's."""

    parity: Parity = Parity.unknown
    measure: str = ""
    """Key of the loss or metric."""
    estimate: float | None = None
    """Difference from the baseline in `unit`. Positive is higher, also if lower is better."""
    low: float | None = None
    """Ends of the interval of `1 - level`, or None if `few` or `equal`."""
    high: float | None = None
    unit: str = "%"
    """`%` of the baseline's, `points` (hundredths of an accuracy), or empty: the metric's own."""
    seeds: int = 0
    """Seeds in common."""
    level: float = ALPHA
    """Level of Holm's test of this row."""
    spread: float | None = None
    """Standard deviation, in `unit`, of the difference of one seed, or None if unknown."""
    first_level: float = ALPHA
    """Level of the strictest test of the family: Holm's first."""
    best_of: int = 1
    """Evaluations of which the best by `train.keep_best` was compared; 1: the final ones."""
    margin: float = 100 * _MARGIN
    """Margin of `within` and `no_worse`, in `unit`."""
    why: str = ""
    """Reason of `few`, `other` and `unknown`."""

    @property
    def name(self) -> str:
        """Name of the measure: `eval loss`, `accuracy, best of 10`."""
        title = metric_of(self.measure).title
        return f"{title}, best of {self.best_of}" if self.best_of > 1 else title

    @property
    def word(self) -> str:
        """Decision in the direction of the value: `lower`, `at most 1 % higher`."""
        one = "1 point" if self.unit == "points" else "1 %"
        is_low = is_better_lower(self.measure)
        better, worse = ("lower", "higher") if is_low else ("higher", "lower")
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
        """True if the row cannot be named best: shown worse, by an estimate beyond the margin."""
        return self.parity is Parity.worse and abs(self.estimate or 0.0) > self.margin

    @property
    def change(self) -> str:
        """Difference with its interval, if any: `+3.1 % (+1.8 to +4.4 %)`."""
        text = "" if self.estimate is None else self._with_unit(self.estimate)
        return f"{text} ({self.interval})" if self.interval else text

    @property
    def interval(self) -> str:
        """Interval, `-0.6 to +0.8 %`, or empty if `few` or `equal`."""
        if self.low is None or self.high is None:
            return ""
        return self._with_unit(self.low, self.high)

    def _with_unit(self, *values: float) -> str:
        """Format values with one number of decimals: two digits of the largest."""
        least = 1e-2 if self.unit else 1e-4
        size = math.floor(math.log10(max(least, *map(abs, values))))
        decimals = max(0 if size else 1, -size + (0 if self.unit else 1), 0)
        if any(value and not round(value, decimals) for value in values):
            decimals += 1  # an end near 0 keeps its sign: -0.3, not -0
        text = " to ".join(f"{value:+.{decimals}f}" for value in values)
        return f"{text} {self.unit}".rstrip()

    def seeds_needed(self, difference: float) -> int | None:
        """Return the seeds that show a difference (in `unit`) in 9 of 10 cases, or None if unknown.

        n = 2 (z + 1.28)^2 (noise / difference)^2, with z of Holm's first step.
        """
        if self.spread is None:
            return None
        return math.ceil(repeats_to_show(difference, self.spread, self.first_level))

    @property
    def more_seeds(self) -> tuple[int, float] | None:
        """Seeds to show a difference, more than there are, and this difference, or None if unknown.

        The smallest of some margins (1 %, one point) that MANY_SEEDS show, else the largest.
        """
        sizes = [each * self.margin for each in (1.0, 2.0, 3.0, 5.0, 10.0) if self.margin]
        needed = [(n, size) for size in sizes if (n := self.seeds_needed(size) or 0) > self.seeds]
        few = [each for each in needed if each[0] <= MANY_SEEDS]
        return next(iter(few), needed[-1] if needed else None)


def compare_losses(
    base: Variant, variants: Sequence[Variant], by: str = "", level: float = ALPHA
) -> dict[Variant, LossComparison]:
    """Compare losses, or a metric, of one machine's variants with the baseline's.

    `by` is as of `keys_by`; empty for the evaluation loss, else the training loss. `level` is as of
    `holm_levels`.
    """
    found: dict[Variant, LossComparison] = {base: LossComparison(Parity.baseline)}
    for key in keys_by(by):
        rows = [v for v in variants if v not in found and base.sample(key) and v.sample(key)]
        whys = {each: _why_not_comparable(key, base, each) for each in rows}
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
    """Return the samples, or tokens, of the smallest evaluation, or 0 if unknown."""
    counts = []
    for record in (record for each in rows for record in each.records):
        count = table(record.plan, "steps").get("num_eval_samples") or 0
        length = table(record.plan, "size").get("tokens_per_sample") or 1
        counts.append(int(count * length if key == f"{METRIC}token_accuracy" else count))
    return min(counts, default=0)


def _why_not_comparable(key: str, base: Variant, other: Variant) -> str:
    """Return why two losses are not comparable, or empty if they are."""
    if len({each.settings.get("data.packing") == "on" for each in (base, other)}) > 1:
        return "a packed row holds several samples"

    def seen(variant: Variant) -> str:
        return f"{fmean([samples_seen(record) or 0 for record in variant.records]):.0f}"

    def chosen(variant: Variant) -> str:
        found = {best_of(key, record) for record in variant.records}
        names = {f"best {m} of {n} evaluations" if n > 1 else "last evaluation" for m, n in found}
        return " or ".join(sorted(names))

    for of, what in ((seen, " samples seen"), (chosen, "")):
        if of(other) != of(base):
            return f"{of(other)}{what}, the baseline {of(base)}"
    return ""


@dataclass(frozen=True)
class _Scale:
    """Scale on which values of one measure are compared."""

    key: str
    unit: str
    """As of LossComparison. `%` compares logarithms, so all values are positive."""
    margin: float
    """MARGIN on this scale."""
    equal: float
    """EQUAL on this scale."""
    floor: float = 0.0
    """Least variance of one value: rounding to one of n samples has 1 / (12 n^2)."""

    @classmethod
    def of(cls, key: str, samples: Sequence[Sample], evaluated: int) -> "_Scale":
        """Return the scale of some samples, the baseline's first."""
        size = abs(fmean(samples[0].values()))
        # Shares are in points, each value rounded to one of the evaluation's samples.
        if key.removeprefix(METRIC) in ("accuracy", "f1_macro", "f1_micro", "token_accuracy"):
            floor = (100 / evaluated) ** 2 / 12 if evaluated else 0.0
            return cls(key, "points", 100 * _MARGIN, 100 * size * _EQUAL, floor)
        if is_better_lower(key) and all(value > 0 for each in samples for value in each.values()):
            return cls(key, "%", math.log1p(_MARGIN), _EQUAL)
        return cls(key, "", _MARGIN * size, _EQUAL * (size or 1.0))

    def convert(self, sample: Sample) -> Sample:
        """Return values on this scale."""
        if self.unit == "%":
            return {seed: math.log(value) for seed, value in sample.items()}
        factor = 100 if self.unit == "points" else 1
        return {seed: factor * value for seed, value in sample.items()}

    def result(self, found: Difference, level: float, strictest: float) -> LossComparison:
        """Return a difference as tested at this level, of a family with this strictest one."""
        ends, is_log = found.interval(level), self.unit == "%"
        estimate, low, high = (
            100 * math.expm1(each) if is_log and each is not None else each
            for each in (found.mean, *(ends or (None, None)))
        )
        return LossComparison(
            self._parity(*ends) if ends else Parity.few,
            self.key,
            estimate,
            low,
            high,
            self.unit,
            found.n,
            level,
            (100 if is_log else 1) * found.error.spread if found.error else None,
            strictest,
            margin=100 * _MARGIN if is_log else self.margin,
            why="" if ends else "one seed" if found.n == 1 else format_number(found.n, "seed"),
        )

    def _parity(self, low: float, high: float) -> Parity:
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
    """Compare rows in one measure with the first one, the baseline, as one family of Holm's.

    Each other training is tested once, and each unequal row of the baseline's own training.
    `samples` are row -> seed -> value (all are empty, or none). `trainings` have the same value for
    rows of one training. `evaluated` are the samples of an evaluation, or 0 if unknown.
    """
    base, *rows = samples
    if not rows:
        return {}
    scale = _Scale.of(key, list(samples.values()), evaluated)
    values = {row: scale.convert(sample) for row, sample in samples.items()}
    alone = {row: difference_of(values[base], values[row], 2 * scale.floor) for row in rows}
    equal = set()
    for row in rows:
        changes = [abs(values[row][s] - x) for s, x in values[base].items() if s in values[row]]
        equal |= {row} if max(changes, default=math.inf) <= scale.equal else set()
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
    """Return trainings, the baseline's first, with separate rows and merged copies."""
    base, number = groups[0][0], sum(len(rows) for rows in groups if len(rows) > 1)
    split: list[list[K]] = []
    for rows in groups:
        apart = _outlying(rows, values, scale, level / number) if len(rows) > 1 else []
        rest = [row for row in rows if row not in apart]
        split += [*([row] for row in apart), *([rest] if rest else [])]
    split.sort(key=lambda rows: base not in rows)
    if scale.floor:
        return split
    copies: dict[Hashable, list[K]] = {}
    for rows in split:
        rounded = {s: round(v / scale.equal) for s, v in _mean(rows, values).items()}
        copies.setdefault(frozenset(rounded.items()), []).extend(rows)
    return list(copies.values())


def _outlying(
    rows: Sequence[K], samples: Mapping[K, Sample], scale: _Scale, level: float
) -> list[K]:
    """Return the rows of a training that differ from the median of its others."""
    shared = [seed for seed in samples[rows[0]] if all(seed in samples[row] for row in rows)]
    if len(shared) < MIN_REPEATS:
        return list(rows)
    values = np.array([[samples[row][seed] for row in rows] for seed in shared])
    ordered, rank, others = np.sort(values), values.argsort().argsort(), len(rows) - 1
    low, high = (
        np.take_along_axis(ordered, place + (rank <= place), -1)
        for place in ((others - 1) // 2, others // 2)
    )
    found = [mean_difference(c, 2 * scale.floor) for c in (values - (low + high) / 2).T.tolist()]
    is_apart = [(d.p or 0.0) <= level and abs(d.mean) > scale.margin for d in found]
    return [row for row, is_one in zip(rows, is_apart, strict=True) if is_one]


def _mean(rows: Sequence[K], samples: Mapping[K, Sample]) -> Sample:
    """Return the mean over a training's rows by seed."""
    first, *others = (samples[row] for row in rows)
    shared = [seed for seed in first if all(seed in each for each in others)]
    return {seed: fmean(samples[row][seed] for row in rows) for seed in shared}
