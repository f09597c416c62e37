"""The verdict in words: the sentences of all claims, the same in every format."""

import math
from collections.abc import Sequence
from statistics import fmean, median

from eke.common.paths import program
from eke.common.text import format_bytes, format_number
from eke.config.schema.fields import Affects
from eke.plan.record import Outcome
from eke.results.report.compare.claims import Claim, Kind, beyond, find_claims
from eke.results.report.compare.comparison import (
    Comparison,
    ComparisonRow,
    OneMachine,
    loss_words,
    times,
)
from eke.results.report.compare.curves import repeat_spread
from eke.results.report.compare.load_records import NOT_RUN
from eke.results.report.compare.losses import MANY_SEEDS, Parity
from eke.results.report.compare.measures import PEAK, is_better_lower
from eke.results.report.compare.statistics import (
    ALPHA,
    MIN_REPEATS,
    SAME,
    Significance,
    repeats_to_show,
)

NAMED = 3
"""Configurations named in a sentence."""

MOST = 200
"""Characters of a sentence: two lines of a page."""

LONG = 40
"""Characters of a baseline's name above which it is called the baseline."""

DIFFERENCES = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Differences of speed of which the report says how many repeats would show them."""


def verdict_lines(comparison: Comparison) -> list[str]:
    """Sentences of all claims, one each, with the group and the machine if there are several."""
    lines: list[str] = []
    singles: list[str] = []
    for part in comparison.machines or [None]:
        claims = [claim for claim in find_claims(comparison) if claim.part is part]
        if claims[0].kind is Kind.only_one and part and part.work:
            singles.append(f"{_place(comparison, part)} ({_runs(comparison, part)})")
            claims = claims[1:]
        found = [text for each in claims for text in _Words(comparison, claims, each).lines()]
        place = _place(comparison, part) if part else ""
        count = f" ({_runs(comparison, part)})" if part and part.work else ""
        for number, text in enumerate(found):
            where = f"{place}{'' if number else count}: " if place else ""
            lines += _cut(f"{where}{text}", tuple(map(_name, comparison.rows)))
    if singles:
        lines.append(f"{_first_of(singles)}: nothing to compare with.")
    return lines


def _cut(line: str, names: tuple[str, ...]) -> list[str]:
    """One sentence, or several if it is too long; a configuration's name keeps its case."""
    start, end, rest = line.partition("; ")
    if len(line) <= MOST or not end:
        return [line]
    rest = rest if rest.startswith(names) else _capital(rest)
    return [f"{start}.", *_cut(rest, names)]


def _place(comparison: Comparison, part: OneMachine) -> str:
    several = len({each.machine.letter for each in comparison.machines}) > 1
    word = "machine" if part.work else "Machine"
    return ", ".join(filter(None, [part.work, f"{word} {part.machine.letter}" if several else ""]))


def _runs(comparison: Comparison, part: OneMachine) -> str:
    return format_number(sum(len(r.variant.entries) for r in comparison.rows_of(part)), "run")


class _Words:
    """Sentences of one claim among those of its part."""

    def __init__(self, comparison: Comparison, claims: Sequence[Claim], claim: Claim) -> None:
        self._comparison, self._claims, self._claim = comparison, claims, claim
        self._part, self._key = claim.part, claim.measure.key
        self._rows = comparison.rows_of(claim.part) if claim.part else []
        self._base = next((row for row in self._rows if row.is_baseline), None)
        name = _name(self._base) if self._base else ""
        self._base_name = name if 0 < len(name) <= LONG else "the baseline"
        self._first = claim.rows[0] if claim.rows else None
        self._names = _first_of([_name(row) for row in claim.rows])

    def lines(self) -> list[str]:
        """The sentences."""
        claim = self._claim
        plain = {
            Kind.nothing: "No run has succeeded yet: there is nothing to compare.",
            Kind.none_well: "No run succeeded: there is nothing to compare.",
            Kind.only_one: f"Only one configuration succeeded ({self._names}): nothing to compare.",
            Kind.no_baseline: "There is no baseline to compare with; choose one with --baseline.",
            Kind.unmeasured: f"No comparable {'loss' if claim.is_loss else 'speed'} was measured.",
        }
        if claim.kind in plain:
            return [plain[claim.kind]]
        common = {
            Kind.unquiet: self._unquiet, Kind.missing: self._missing, Kind.failed: self._failed,
            Kind.ahead: self._ahead, Kind.peers: self._peers,
            Kind.at_worse_loss: self._at_worse_loss,
        }  # fmt: skip
        if claim.kind in common:
            return common[claim.kind]()
        if claim.is_loss:
            return [*self._of_loss(), *self._no_speed()]
        return self._of_memory() if claim.measure is PEAK else self._of_speed()

    def _unquiet(self) -> list[str]:
        spread = repeat_spread(self._base.variant) if self._base else 1.0
        kinds = [each.kind for each in self._claims if each.measure.is_speed]
        end = (
            "" if Kind.best in kinds or Kind.at_worse_loss in kinds else ", so no speed is decided"
        )
        start = f"The machine was not quiet: {self._base_name}'s own repeats differ by"
        return [f"{start} {spread:.1f}x{end}."]

    def _missing(self) -> list[str]:
        rows = self._claim.rows
        named = _first_of([f"{_name(row)} ({len(row.variant.records)})" for row in rows])
        waiting = sum(row.variant.outcomes.get(NOT_RUN, 0) for row in rows)
        lacking = sum(MIN_REPEATS - len(row.variant.records) for row in rows)
        advice = self._advice(lacking)
        if waiting:
            advice = f"the same command measures {self._cost(waiting)}"
        return [f"Too few repeats to compare: {named}; {advice}."]

    def _failed(self) -> list[str]:
        texts = []
        for row in self._claim.rows:
            (outcome, count), *_ = row.variant.outcomes.items()
            word = {Outcome.oom.name: "ran out of memory"}.get(outcome, outcome)
            texts.append(f"{_name(row)} {word} in {count} of {len(row.variant.entries)}")
        return [f"{_first_of(texts)}."]

    def _ahead(self) -> list[str]:
        better = "Higher" if self._claim.measure.is_speed or not self._is_low else "Lower"
        named = [f"{_name(row)} with {self._number(row)}" for row in self._claim.rows]
        return [f"{better}, but not decided: {_first_of(named)}."]

    def _peers(self) -> list[str]:
        rows = [row for row in self._claim.rows if row not in self._tied()]
        names = _first_of([_name(row) for row in rows])
        return [f"Not distinguishable from it: {names}."] if rows else []

    def _at_worse_loss(self) -> list[str]:
        row, alone = self._claim.rows[0], not self._of(Kind.best)
        told = [each for each in self._claims if each.kind is Kind.at_worse_loss]
        if self._claim is not told[0] and row is told[0].rows[0]:
            return []
        loss = row.quality
        what = f"needs {'the least' if alone else 'less'} memory"
        if self._claim.measure is not PEAK:
            what = "is fastest" if alone else "is faster"
        start = f"{_name(row)} {what}, {self._number(row)}"
        return [f"{start}, but its {loss.name} is {loss.word}: {loss.change}."]

    def _of_speed(self) -> list[str]:
        claim, rows = self._claim, self._claim.rows
        ratios, base = [row.ratios[self._key] for row in rows], self._base_name
        name, first, count = _name(rows[0]), ratios[0], len(rows) + 1
        values = sorted(ratio.value for ratio in ratios)
        span = f"{values[0]:.2f}x to {values[-1]:.2f}x"
        if claim.kind is Kind.best:
            return [self._fastest()]
        if claim.kind is Kind.few:
            runs = {len(row.variant.records) for row in self._rows} - {0}
            each = {1: "One run", 2: "Two runs"}.get(
                max(runs) if len(runs) == 1 else 0, "Too few runs"
            )
            best = f"{name} with {times(first)}" if first.value > 1 else base
            if rows[0].quality.parity is Parity.other:
                best += f", {loss_words(rows[0].quality)}"
            lacking = sum(max(0, MIN_REPEATS - len(row.variant.records)) for row in self._rows)
            text = f"{each} each, so no difference in speed is shown; highest: {best}."
            return [text, f"{_capital(self._advice(lacking))}."]
        if claim.kind is Kind.same:
            memory = [row.ratios.get(PEAK.key) for row in rows]
            equal = all(each and abs(each.value - 1) <= SAME for each in memory)
            every = "Both" if count == 2 else f"All {count}"
            end = " and in the same memory; choose by other reasons" if equal else ""
            return [f"{every} run at the same speed within {100 * SAME:.0f} %{end}."]
        if claim.kind is Kind.none_better:
            has = f"{name} has {times(first)}" if len(rows) == 1 else f"the others have {span}"
            return [f"Nothing is faster than {base}: {has} its speed."]
        if self._claims[0].measure is PEAK:
            return [f"Nothing is shown to be faster than {base}."]
        if len(rows) > 1 and Significance.lower in {ratio.decision for ratio in ratios}:
            others = f"the others have {span} its speed, the fastest is {name}, {times(first)}"
            return [f"Nothing is shown to be faster than {base}: {others}."]
        if len(rows) == 1:
            start = f"{name} has {times(first)} the speed of {base}"
            return [f"No difference in speed is shown: {start}.", *self._more_repeats()]
        width = f"intervals up to +-{100 * max(map(beyond, ratios)):.0f} %"
        return [
            f"No difference in speed is shown among {count} configurations ({span}, {width}).",
            *self._more_repeats(),
        ]

    def _fastest(self) -> str:
        row, tied = self._claim.rows[0], self._tied()
        few = any(each.kind is Kind.missing for each in self._claims)
        among = f" of those with {row.ratios[self._key].n} repeats" if few else ""
        among = " of those decided" if self._of(Kind.ahead) else among
        names = [_name(row), *map(_name, tied)]
        speeds = [
            times(row.ratios[self._key]),
            *(f"{r.ratios[self._key].value:.2f}x" for r in tied),
        ]
        if tied:
            start = f"{_all_of(names)} are fastest{among}, tied: {_all_of(speeds)}"
        elif self._claim.is_limited:
            start = f"Fastest{among} without a {self._worse(row)}: {names[0]}, {speeds[0]}"
        else:
            start = f"{names[0]} is fastest{among}: {speeds[0]}"
        start += f" the speed of {self._base_name}"
        held = {each: each.ratios[PEAK.key] for each in (row, *tied) if PEAK.key in each.ratios}
        least = min(held, key=lambda each: held[each].value, default=None)
        if tied and least and held[least].value < 1 - SAME:
            start += f"; {_name(least)} needs the least memory of them, {times(held[least])}"
        elif row in held:
            start += f" at {times(held[row])} its memory"
        open_ = [each for each in tied if each.quality.parity is Parity.undecided]
        losses = [loss_words(row.quality), *(f"{_name(r)}: {loss_words(r.quality)}" for r in open_)]
        return f"{start}; {'; '.join(losses)}."

    def _of_memory(self) -> list[str]:
        row, kind = self._claim.rows[0], self._claim.kind
        fastest = [c for c in self._claims if c.kind is Kind.best and c.measure.is_speed]
        if kind not in (Kind.best, Kind.few) or (fastest and fastest[0].rows[0] is row):
            return []
        text = f"{_name(row)} needs {self._number(row)} the memory of {self._base_name}"
        sizes = [each and each.estimates.get(PEAK.key) for each in (row, self._base)]
        if sizes[0] and sizes[1]:
            (own, unit), (its, of) = (format_bytes(size.value).split() for size in sizes if size)
            text += (
                f" ({float(own):.3g}{'' if unit == of else f' {unit}'} of {float(its):.3g} {of})"
            )
        if self._part and (speed := row.ratios.get(self._part.speed.key)):
            text += f" at {times(speed)} its speed"
        among = f"Among those without a {self._worse(row)}, " if self._claim.is_limited else ""
        return [f"{among}{text}; {loss_words(row.quality)}."]

    def _of_loss(self) -> list[str]:
        claim, row = self._claim, self._claim.rows[0]
        found, name, base = row.quality, _name(row), self._base_name
        which = "lowest" if self._is_low else "highest"
        noun = self._noun()
        if claim.kind is Kind.best:
            is_both = self._part is not None and self._part.focus is not Affects.learning
            speed = row.ratios.get(self._part.speed.key) if self._part and is_both else None
            cost = f", at {times(speed)} the speed" if speed else ""
            return [f"{name} has the {which} {found.name}: {found.change} against {base}{cost}."]
        sign = 1 if self._is_low else -1
        is_better = sign * (found.estimate or 0.0) < 0
        if claim.kind is Kind.few:
            best = f"{name} with {found.change}" if is_better else base
            seeds = _capital(found.why or "too few seeds")
            text = f"{seeds} each, so no difference in {found.name} is shown; {which}: {best}."
            return [text, self._more_seeds(row)]
        if claim.kind is Kind.same:
            return [f"All {len(claim.rows) + 1} have the same {found.name}."]
        if claim.kind is Kind.none_better:
            return [f"{base} has the {which} {found.name}: the next is {name}, {found.change}."]
        best = name if is_better else f"{base}, then {name}"
        text = f"No {noun} is shown to be best; {which} is {best}, {found.change}"
        text += f" with {format_number(found.seeds, 'seed')}"
        if more := found.more_seeds:
            text += f"; {more[0]} seeds would show {more[1]:g} {found.unit}".rstrip()
        return [f"{text}."]

    def _no_speed(self) -> list[str]:
        """That what differs does not change the speed, after the first claim about the loss."""
        if not self._part or self._part.focus is not Affects.learning:
            return []
        keys = self._part.keys
        subject = "These keys do" if len(keys) != 1 else f"{_capital(_article(self._noun()))} does"
        return [f"{subject} not change the speed."]

    def _noun(self) -> str:
        keys = self._part.keys if self._part else ()
        if len(keys) != 1:
            return "configuration"
        last = keys[0].rpartition(".")[2]
        return {"lr": "learning rate"}.get(last, last)

    @property
    def _is_low(self) -> bool:
        """Whether lower is better."""
        return self._claim.measure is PEAK or (self._claim.is_loss and is_better_lower(self._key))

    def _of(self, kind: Kind) -> list[Claim]:
        same = [each for each in self._claims if each.measure == self._claim.measure]
        return [each for each in same if each.kind is kind]

    def _tied(self) -> list[ComparisonRow]:
        """Rows that are fast as well: shown to be better than the baseline, like the best."""
        if self._claim.is_loss or self._claim.measure is PEAK or not self._of(Kind.best):
            return []
        decision = self._of(Kind.best)[0].rows[0].ratios[self._key].decision
        peers = [row for each in self._of(Kind.peers) for row in each.rows]
        return [row for row in peers if row.ratios[self._key].decision is decision]

    def _number(self, row: ComparisonRow) -> str:
        return row.quality.change if self._claim.is_loss else times(row.ratios[self._key])

    def _worse(self, row: ComparisonRow) -> str:
        """The loss or metric, if it is worse: `higher eval loss`."""
        found = next((r.quality for r in self._rows if r.quality.excludes), row.quality)
        return f"{found.word} {found.name}" if found.excludes else "higher loss"

    def _more_repeats(self) -> list[str]:
        """Repeats that would show a difference of speed, and their time."""
        if not self._part or not self._part.baseline:
            return []
        noise, rows = self._part.noise[self._key], self._claim.rows
        found = [noise.difference((self._part.baseline, row.variant)) for row in rows]
        spreads = [each.error.spread for each in found if each and each.error]
        have = max((each.n for each in found if each), default=0)
        good = sum(bool(row.variant.records) for row in self._rows)
        for size in DIFFERENCES if spreads else ():
            level = ALPHA / len(spreads)
            needed = math.ceil(repeats_to_show(math.log1p(size), median(spreads), level))
            if have < needed <= MANY_SEEDS:
                more, cost = needed - have, self._time((needed - have) * good)
                repeats = format_number(more, "more repeat")
                return [f"{repeats}{f', {cost},' if cost else ''} would show {100 * size:.0f} %."]
        return []

    def _more_seeds(self, row: ComparisonRow) -> str:
        lacking = sum(max(0, MIN_REPEATS - row.quality.seeds) for row in self._claim.rows)
        return f"{_capital(self._advice(lacking + MIN_REPEATS - row.quality.seeds, True))}."

    def _advice(self, runs: int, seeds: bool = False) -> str:
        """What measures the missing runs. Single runs and `eke fit` reject `sweep.repeats`."""
        keys = f"sweep.repeats={MIN_REPEATS}{' sweep.seeds=per_repeat' if seeds else ''}"
        if any(command[0] != "fit" for command in self._comparison.commands):
            return f"{keys} and the same command measures {self._cost(runs)}"
        return f"{program()} -m with {keys} runs each {MIN_REPEATS} times"

    def _cost(self, runs: int) -> str:
        return ", ".join(filter(None, [format_number(runs, "run"), self._time(runs)]))

    def _time(self, runs: int) -> str:
        """Time of some runs, by those that ended; empty if unknown."""
        timings = [record.timing for row in self._rows for record in row.variant.records]
        took = [(each.train_s or 0.0) + (each.startup_s or 0.0) for each in timings]
        seconds = runs * fmean(took) if took else 0.0
        if not seconds:
            return ""
        if seconds < 90:
            return f"about {seconds:.0f} s"
        minutes = seconds / 60
        return f"about {minutes:.0f} min" if minutes < 90 else f"about {minutes / 60:.1f} h"


def _name(row: ComparisonRow) -> str:
    """Name of a configuration, quoted if it is that of a sweep's row."""
    label = row.variant.label
    return f'"{label}"' if row.variant.rows else label


def _capital(text: str) -> str:
    return text if text.startswith(("sweep.", program())) else f"{text[:1].upper()}{text[1:]}"


def _article(noun: str) -> str:
    return f"a {noun}" if noun in ("learning rate", "schedule") else noun


def _first_of(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
    return f"{', '.join(labels[:NAMED])}{more}"


def _all_of(texts: Sequence[str]) -> str:
    """`a, b and c`; of many, `a, b and 3 more`."""
    kept = [*texts[: NAMED - 1], f"{len(texts) - NAMED + 1} more"] if len(texts) > NAMED else texts
    return " and ".join([", ".join(kept[:-1]), kept[-1]]) if len(kept) > 1 else kept[0]
