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
from statistics import fmean, median

from eke.common.files import plain
from eke.common.text import format_number
from eke.plan.identity import canonical
from eke.plan.record import Record, table
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

ANOTHER_TRAINING = "another model, task or data"
"""Reason that losses and speeds of two configurations are not comparable."""

NAMED = (1.0, 2.0, 3.0, 5.0, 10.0)
"""Differences, in % or points, of which the report says how many seeds would show them."""

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
        end = f" {self.unit}" if self.unit else ""
        text = f"{self.estimate:+.2g}{end}"
        return f"{text} ({self.interval})" if self.interval else text

    @property
    def interval(self) -> str:
        """`-0.6 to +0.8 %`; empty with too few seeds, and for what is equal."""
        if self.low is None or self.high is None:
            return ""
        return f"{self.low:+.2g} to {self.high:+.2g}{f' {self.unit}' if self.unit else ''}"

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
        needed = [(n, each) for each in NAMED if (n := self.seeds_needed(each) or 0) > self.seeds]
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
    found: dict[Variant, LossComparison] = {}
    families = []
    for key in keys_by(by):
        rows = []
        for each in variants:
            if each is base:
                found[each] = LossComparison(Parity.baseline)
            elif each not in found and base.sample(key) and each.sample(key):
                rows.append(each)
                if why := _difference_of_trainings(key, base, each):
                    found[each] = LossComparison(Parity.other, key, why=why)
        rows = [each for each in rows if each not in found]
        if rows:
            families.append(_Family(key, base, rows, training_key, level))
            found |= dict.fromkeys(rows, LossComparison())
    levels = holm_levels({k: d for each in families for k, d in each.tests().items()}, level)
    for family in families:
        found |= family.results(levels)
    why = f"no {by or 'loss'} was measured"
    return {each: found.get(each) or LossComparison(why=why) for each in variants}


def is_another_training(base: Variant, other: Variant) -> bool:
    """Whether model, task or data differ, so that speeds are not comparable."""
    return bool(base.records and other.records) and not _learn_alike(base.records, other.records)


def _difference_of_trainings(key: str, base: Variant, other: Variant) -> str:
    """Reason that two losses are not comparable; empty if they are."""
    if not _learn_alike(base.records, other.records):
        return ANOTHER_TRAINING
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


def _learn_alike(base: Sequence[Record], other: Sequence[Record]) -> bool:
    """Whether two configurations have the same model, task and data."""

    def learned(record: Record) -> str:
        config = record.config
        model, task, data = (config.get(group) for group in ("model", "task", "data"))
        length = data.get("seq_len") if isinstance(data, dict) else None
        return canonical(plain([model, task, length, record.plan.get("data_fingerprint")]))

    return set(map(learned, base)) == set(map(learned, other))


POINTS = ("accuracy", "f1_macro", "f1_micro", "token_accuracy")
"""Metrics that are shares: in points, each value rounded to one of the evaluation's samples."""


@dataclass(frozen=True)
class _Scale:
    """How values of one measure are compared, and what is shown of a difference."""

    is_log: bool
    unit: str
    margin: float
    """MARGIN, on the scale of comparison."""
    equal: float
    """EQUAL, likewise."""
    floor: float = 0.0
    """Least variance of one value: that of rounding to one of n samples, 1 / (12 n^2)."""

    def of(self, sample: Sample) -> Sample:
        """Values as they are compared: logarithms, points, or the values."""
        factor = 100 if self.unit == "points" else 1
        convert = math.log if self.is_log else lambda value: factor * value
        return {seed: convert(value) for seed, value in sample.items()}

    def shown(self, difference: float) -> float:
        """A difference in `unit`."""
        return 100 * math.expm1(difference) if self.is_log else difference


def _scale(key: str, rows: Sequence[Variant]) -> _Scale:
    """Logarithms where a ratio has a meaning: of what is positive, and better lower."""
    name = key.removeprefix(METRIC)
    base, *_ = samples = [each.sample(key).values() for each in rows]
    size = abs(fmean(base))
    if name in POINTS:
        counts = [_evaluated(name, record) for each in rows for record in each.records]
        floor = (100 / min(counts)) ** 2 / 12 if all(counts) else 0.0
        return _Scale(False, "points", 100 * MARGIN, 100 * size * EQUAL, floor)
    if is_better_lower(key) and all(value > 0 for values in samples for value in values):
        return _Scale(True, "%", math.log1p(MARGIN), EQUAL)
    return _Scale(False, "", MARGIN * size, EQUAL * size)


def _evaluated(name: str, record: Record) -> float:
    """Samples (or tokens) of an evaluation; 0 if unknown."""
    count = table(record.plan, "steps").get("num_eval_samples") or 0
    length = table(record.plan, "size").get("tokens_per_sample") or 1
    return float(count * length if name == "token_accuracy" else count)


class _Family:
    """Comparisons of one baseline in one measure: trainings, and their tests for Holm's method."""

    def __init__(
        self,
        key: str,
        base: Variant,
        rows: Sequence[Variant],
        training_key: Callable[[Variant], Hashable],
        level: float,
    ) -> None:
        self._key, self._base, self._level = key, base, level
        self._scale = _scale(key, [base, *rows])
        self._samples = {each: self._scale.of(each.sample(key)) for each in (base, *rows)}
        self._untested: dict[Variant, LossComparison] = {}
        tested = [each for each in rows if not self._leaves(each, training_key)]
        groups: dict[Hashable, list[Variant]] = {}
        for each in (base, *tested):
            groups.setdefault(training_key(each), []).append(each)
        own, *self._trainings = self._split(list(groups.values()))
        means = dict(enumerate(map(self._mean, (own, *self._trainings))))
        compared = Compared(means, is_log=False, floor=self._scale.floor)
        self._tests: list[tuple[list[Variant], Difference | None]] = [
            *(([each], self._between(each)) for each in own if each is not base),
            *(
                (members, compared.difference((0, n + 1)))
                for n, members in enumerate(self._trainings)
            ),
        ]

    def tests(self) -> dict[tuple[str, int], Difference]:
        """What Holm's method tests, numbered."""
        return {(self._key, n): found for n, (_, found) in enumerate(self._tests) if found}

    def results(self, levels: Mapping[tuple[str, int], float]) -> dict[Variant, LossComparison]:
        """The comparison of each row, with the levels at which all were tested."""
        strictest = min(levels.values(), default=self._level)
        found = {
            each: self._result(difference, levels[self._key, n], strictest)
            for n, (members, difference) in enumerate(self._tests)
            for each in members
            if difference
        }
        return found | self._untested

    def _leaves(self, row: Variant, training_key: Callable[[Variant], Hashable]) -> bool:
        """Note what is said of a row without a test; whether it leaves the family for it."""
        shared = [seed for seed in self._samples[self._base] if seed in self._samples[row]]
        changes = [self._samples[row][seed] - self._samples[self._base][seed] for seed in shared]
        found = self._between(row)
        told = self._result(found, self._level, self._level)
        if changes and max(map(abs, changes)) <= self._scale.equal:
            self._untested[row] = replace(told, parity=Parity.equal, low=None, high=None)
            # Rounded values are equal by chance as well: such a row counts among those tested.
            by_chance = self._scale.floor and training_key(row) != training_key(self._base)
            return found.error is None or not by_chance
        if found.error is None:
            why = "one seed" if found.n == 1 else format_number(found.n, "seed")
            self._untested[row] = replace(told, parity=Parity.few, why=why)
        return found.error is None

    def _split(self, groups: Sequence[list[Variant]]) -> list[list[Variant]]:
        """Trainings, the baseline's first: without rows that stand apart, copies as one."""
        number = sum(len(members) for members in groups if len(members) > 1)
        split: list[list[Variant]] = []
        for members in groups:
            apart = [each for each in members if self._stands_apart(each, members, number)]
            rest = [each for each in members if each not in apart]
            split += [*([each] for each in apart), *([rest] if rest else [])]
        split.sort(key=lambda members: self._base not in members)
        if self._scale.floor:
            return split
        copies: dict[Hashable, list[Variant]] = {}
        for members in split:
            rounded = {s: round(v / self._scale.equal) for s, v in self._mean(members).items()}
            copies.setdefault(frozenset(rounded.items()), []).extend(members)
        return list(copies.values())

    def _stands_apart(self, row: Variant, members: Sequence[Variant], number: int) -> bool:
        """Whether a row of a training differs from its others, among `number` such rows."""
        others = [self._samples[each] for each in members if each is not row]
        shared = [s for s in self._samples[row] if all(s in each for each in others)]
        if not others or len(shared) < MIN_REPEATS:
            return bool(others)
        found = mean_difference(
            [self._samples[row][s] - median([each[s] for each in others]) for s in shared],
            2 * self._scale.floor,
        )
        p = 1.0 if found.p is None else found.p
        return p <= self._level / number and abs(found.mean) > self._scale.margin

    def _mean(self, members: Sequence[Variant]) -> Sample:
        """Mean over a training's rows by seed."""
        samples = [self._samples[each] for each in members]
        shared = [seed for seed in samples[0] if all(seed in each for each in samples)]
        return {seed: fmean([each[seed] for each in samples]) for seed in shared}

    def _between(self, row: Variant) -> Difference:
        """The difference of one row from the baseline, by the noise of these two."""
        samples = {each: self._samples[each] for each in (self._base, row)}
        compared = Compared(samples, is_log=False, floor=self._scale.floor)
        return compared.difference((self._base, row)) or Difference(0.0, 0)

    def _result(self, found: Difference, level: float, strictest: float) -> LossComparison:
        ends, scale = found.interval(level), self._scale
        return LossComparison(
            self._parity(*ends) if ends else Parity.few,
            self._key,
            scale.shown(found.mean),
            low=scale.shown(ends[0]) if ends else None,
            high=scale.shown(ends[1]) if ends else None,
            unit=scale.unit,
            seeds=found.n,
            level=level,
            spread=(100 if scale.is_log else 1) * found.error.spread if found.error else None,
            first_level=strictest,
            best_of=max(best_of(self._key, record)[1] for record in self._base.records),
            margin=100 * MARGIN if scale.is_log else scale.margin,
        )

    def _parity(self, low: float, high: float) -> Parity:
        """What an interval shows."""
        margin = self._scale.margin
        if not is_better_lower(self._key):
            low, high = -high, -low
        if -margin <= low and high <= margin:
            return Parity.within
        if low > 0:
            return Parity.worse
        if high < 0:
            return Parity.better
        return Parity.no_worse if high <= margin else Parity.undecided
