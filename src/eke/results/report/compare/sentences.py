"""Verdict in words: one sentence per claim, the same in every format."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median

from eke.common.paths import program
from eke.common.text import format_bytes, format_number, format_seconds
from eke.config.schema.fields import Affects
from eke.plan.record import Outcome
from eke.results.report.compare.claims import Claim, Kind, find_claims
from eke.results.report.compare.comparison import Comparison, ComparisonRow, loss_words, times
from eke.results.report.compare.curves import repeat_spread
from eke.results.report.compare.load_records import NOT_RUN
from eke.results.report.compare.losses import MANY_SEEDS, Parity
from eke.results.report.compare.measures import PEAK, is_better_lower, keys_by
from eke.results.report.compare.statistics import (
    MIN_REPEATS,
    SAME,
    Ratio,
    Significance,
    repeats_to_show,
)

_NAMED = 3
"""Configurations named in a sentence."""


def verdict_lines(comparison: Comparison) -> list[str]:
    """Return sentences of all claims, with the group and the machine if there are several."""
    lines: list[str] = []
    singles: list[str] = []
    names = (*map(_name, comparison.rows), "sweep.", program())
    letters = {each.machine.letter for each in comparison.machines}
    for part in comparison.machines or [None]:
        claims = [claim for claim in find_claims(comparison) if claim.part is part]
        texts = [text for each in claims if (text := _Words(comparison, claims, each).sentence())]
        place = first = part.work if part else ""
        if part and part.work:
            place += f", machine {part.machine.letter}" if len(letters) > 1 else ""
            runs = sum(len(row.variant.entries) for row in part.rows)
            first = f"{place} ({format_number(runs, 'run')})"
            if claims[0].kind is Kind.only_one:
                singles, texts = [*singles, first], texts[1:]
        elif part and len(letters) > 1:
            place = first = f"Machine {part.machine.letter}"
        for n, text in enumerate(texts):
            head = place if n else first
            lines += _split_sentences(f"{head}{': ' * bool(head)}{text}.", names)
    return [*lines, *([f"{_first_of(singles)}: nothing to compare with."] if singles else [])]


def _split_sentences(line: str, names: tuple[str, ...]) -> list[str]:
    """Split a long line into sentences. A configuration's name keeps its case."""
    start, end, rest = line.partition("; ")
    if len(line) <= 200 or not end:  # two lines of a page
        return [line]
    rest = rest if rest.startswith(names) else f"{rest[:1].upper()}{rest[1:]}"
    return [f"{start}.", *_split_sentences(rest, names)]


_PLAIN = {
    Kind.nothing: "No run has succeeded yet: there is nothing to compare",
    Kind.none_well: "No run succeeded: there is nothing to compare",
    Kind.no_baseline: "There is no baseline to compare with; choose one with --baseline",
}


class _Words:
    """Sentence of one claim among the claims of its part."""

    def __init__(self, comparison: Comparison, claims: Sequence[Claim], claim: Claim) -> None:
        self.comparison, self.claims, self.claim = comparison, claims, claim
        self.part, self.key, self.kind = claim.part, claim.measure.key, claim.kind
        self.rows = claim.part.rows if claim.part else ()
        self.base = next((row for row in self.rows if row.is_baseline), None)
        name = _name(self.base) if self.base else ""
        self.base_name = name if 0 < len(name) <= 40 else "the baseline"
        self.is_low = claim.measure is PEAK or (claim.measure.is_loss and is_better_lower(self.key))

    def sentence(self) -> str:
        """Return the sentence without its point, or empty if another one says the same."""
        claim = self.claim
        common = {
            Kind.unquiet: self._unquiet, Kind.failed: self._failed, Kind.missing: self._missing,
            Kind.open: self._open, Kind.at_worse_loss: self._at_worse_loss,
            Kind.unmeasured: self._unmeasured,
        }  # fmt: skip
        if self.kind in _PLAIN:
            return _PLAIN[self.kind]
        if self.kind is Kind.only_one:
            only = _first_of(map(_name, claim.rows))
            return f"Only one configuration succeeded ({only}): nothing to compare"
        if self.kind is Kind.ahead:
            named = _first_of(f"{_name(row)} with {self._number(row)}" for row in claim.rows)
            return f"{'Lower' if self.is_low else 'Higher'}, but not decided: {named}"
        if self.kind is Kind.peers:
            others = [_name(row) for row in claim.rows if row not in self._tied()]
            return f"Not distinguishable from it: {_first_of(others)}" if others else ""
        if self.kind in common:
            return common[self.kind]()
        if claim.measure is PEAK:
            return self._of_memory()
        if claim.measure.is_loss:
            is_only = self.part and self.part.focus is Affects.learning
            keys = ", ".join(self.part.keys[:_NAMED]) if self.part and is_only else ""
            return self._of_loss() + (f"; the speed does not depend on {keys}" if keys else "")
        return self._fastest() if self.kind is Kind.best else self._of_speed()

    def _unmeasured(self) -> str:
        if not self.claim.measure.is_loss:
            return "No comparable speed was measured"
        keys, what = keys_by(self.comparison.metric), self.comparison.metric or "loss"
        have = {row for row in self.rows if any(row.variant.sample(key) for key in keys)}
        if have and self.base and self.base not in have:
            return f"{self.base_name} has no {what} to compare with; choose another --baseline"
        return f"No comparable {what} was measured"

    def _unquiet(self) -> str:
        spread = repeat_spread(self.base.variant) if self.base else 1.0
        decided = {Kind.best, Kind.at_worse_loss, Kind.none_better}
        is_decided = any(c.kind in decided and c.measure.is_speed for c in self.claims)
        start = f"The machine was not quiet: {self.base_name}'s own repeats differ by {spread:.1f}x"
        return start if is_decided else f"{start}, so no speed is decided"

    def _failed(self) -> str:
        texts = []
        for row in self.claim.rows:
            (outcome, count), *_ = row.variant.outcomes.items()
            word = "ran out of memory" if outcome == Outcome.oom.name else outcome
            texts.append(f"{_name(row)} {word} in {count} of {len(row.variant.entries)}")
        return _first_of(texts)

    def _open(self) -> str:
        rows, texts = [row for row in self.rows if self.key in row.ratios], []
        for row in self.claim.rows:
            pair = self.base and (self.base.variant, row.variant)
            found = self.part.noise[self.key].difference(pair) if self.part and pair else None
            level = self._ratio(row).level
            # By default, `sweep.resolve` is 5 %.
            needed = found.repeats_needed(level, math.log1p(0.05)) if found else None
            more = math.ceil(needed - found.n) if found and needed else 0
            end = f", {format_number(more, 'more repeat')}" if 0 < more <= MANY_SEEDS else ""
            texts.append(f"{_name(row)} {self._number(row)}{end}")
        mean = fmean(len(row.variant.records) for row in rows)
        start = f"{len(rows) - len(texts)} of {len(rows)} decided after {mean:.1f} repeats"
        return f"{start}; open: {_first_of(texts)}"

    def _missing(self) -> str:
        measured = ((_name(row), row.variant.sample(self.key)) for row in self.claim.rows)
        named = _first_of(f"{name} ({len(sample)})" for name, sample in measured)
        waiting = sum(row.variant.outcomes.get(NOT_RUN, 0) for row in self.claim.rows)
        advice = f"the same command measures {self._cost(waiting)}" if waiting else self._advice()
        return f"Too few repeats to compare: {named}; {advice}"

    def _at_worse_loss(self) -> str:
        row, is_first = self.claim.rows[0], not self._of(Kind.best)
        first = next(each for each in self.claims if each.kind is Kind.at_worse_loss)
        if first is not self.claim and first.rows[0] is row:
            return ""
        what = "is fastest" if is_first else "is faster"
        if self.claim.measure is PEAK:
            what = f"needs {'the least' if is_first else 'less'} memory"
        start = f"{_name(row)} {what}, {self._number(row)}, but its {row.quality.name}"
        return f"{start} is {row.quality.word}: {row.quality.change}"

    def _fastest(self) -> str:
        row, tied = self.claim.rows[0], self._tied()
        among = f" of those with {self._ratio(row).n} repeats" if self._of(Kind.missing) else ""
        among = " of those decided" if self._of(Kind.ahead) else among
        speeds = [times(self._ratio(row)), *(f"{self._ratio(each).value:.2f}x" for each in tied)]
        if tied:
            names = _joined([_name(each) for each in (row, *tied)])
            start = f"{names} are fastest{among}, tied: {_joined(speeds[:_NAMED])}"
        elif self.claim.is_limited:
            start = f"Fastest{among} without a {self._worse()}: {_name(row)}, {speeds[0]}"
        else:
            start = f"{_name(row)} is fastest{among}: {speeds[0]}"
        start += f" the speed of {self.base_name}"
        held = {each: each.ratios[PEAK.key] for each in (row, *tied) if PEAK.key in each.ratios}
        least = min(held, key=lambda each: held[each].value, default=row)
        if tied and held and held[least].value < 1 - SAME:
            start += f"; {_name(least)} needs the least memory of them, {times(held[least])}"
        elif row in held:
            start += f" at {times(held[row])} its memory"
        losses = [loss_words(row.quality), *(
            f"{_name(each)}: {loss_words(each.quality)}"
            for each in tied[: _NAMED - 1] if each.quality.parity is Parity.undecided
        )]  # fmt: skip
        return "; ".join([start, *losses])

    def _of_speed(self) -> str:
        rows, base = self.claim.rows, self.base_name
        ratios = [self._ratio(row) for row in rows]
        first, values = ratios[0], sorted(ratio.value for ratio in ratios)
        its = f"{_name(rows[0])} has {times(first)}"
        if self.kind is Kind.few:
            runs = {len(row.variant.records) for row in self.rows} - {0}
            each = {1: "One run", 2: "Two runs"}.get(sum(runs), "Too few runs")
            best = base if first.value <= 1 else f"{_name(rows[0])} with {times(first)}"
            is_other = rows[0].quality.parity is Parity.other
            end = f", {loss_words(rows[0].quality)}" if is_other else ""
            start = f"{each} each, so no difference in speed is shown; highest: {best}{end}"
            return f"{start}; {self._advice()}"
        if self.kind is Kind.same:
            memory = [row.ratios.get(PEAK.key) for row in rows]
            equal = all(each and abs(each.value - 1) <= SAME for each in memory)
            every = "Both" if len(rows) == 1 else f"All {len(rows) + 1}"
            end = " and in the same memory" if equal else ""
            worse = _first_of(_name(row) for row in rows if row.quality.excludes)
            if worse or equal:
                end += f"; {self._worse()}: {worse}" if worse else "; choose by other reasons"
            return f"{every} run at the same speed within {100 * SAME:.0f} %{end}"
        span = f"the others have {values[0]:.2f}x to {values[-1]:.2f}x its speed"
        span = f"{its} its speed" if len(rows) == 1 else span
        if self.kind is Kind.none_better:
            return f"Nothing is faster than {base}: {span}"
        if self.claims[0].measure is PEAK:
            return f"Nothing is shown to be faster than {base}"
        if Significance.lower in {ratio.decision for ratio in ratios}:
            return f"Nothing is shown to be faster than {base}: {span}; {its}"
        # Half the widest interval, as a factor: the smallest difference that would be shown.
        width = max(math.sqrt((each.high or 1) / (each.low or 1)) for each in ratios) - 1
        among = f"among {len(rows) + 1} configurations ({values[0]:.2f}x to {values[-1]:.2f}x, "
        start = f"No difference in speed is shown {among}intervals up to +-{100 * width:.0f} %)"
        if len(rows) == 1:
            start = f"No difference in speed is shown: {its} the speed of {base}"
        return "; ".join(filter(None, [start, self._more_repeats()]))

    def _of_memory(self) -> str:
        row = self.claim.rows[0]
        best = [c.rows[0] for c in self.claims if c.kind is Kind.best and c.measure.is_speed]
        if self.kind is not Kind.best or row in best:
            return ""
        among = f"Among those without a {self._worse()}, " if self.claim.is_limited else ""
        text = f"{among}{_name(row)} needs {self._number(row)} the memory of {self.base_name}"
        own, its = (each and each.estimates.get(PEAK.key) for each in (row, self.base))
        if own and its:
            (size, unit), (all_, of) = (format_bytes(each.value).split() for each in (own, its))
            text += f" ({float(size):.3g}{f' {unit}' * (unit != of)} of {float(all_):.3g} {of})"
        if speed := row.ratios.get(row.speed.key):
            text += f" at {times(speed)} its speed"
        return f"{text}; {loss_words(row.quality)}"

    def _of_loss(self) -> str:
        row = self.claim.rows[0]
        found, name, base = row.quality, _name(row), self.base_name
        which = f"{'lowest' if self.is_low else 'highest'} {found.name}"
        if self.kind is Kind.best:
            speed = row.ratios.get(row.speed.key)
            cost = f", at {times(speed)} the speed" if speed else ""
            return f"{name} has the {which}: {found.change} against {base}{cost}"
        if self.kind is Kind.same:
            count = len(self.claim.rows) + 1
            return f"{'Both' if count == 2 else f'All {count}'} have the same {found.name}"
        if self.kind is Kind.none_better:
            return f"{base} has the {which}: the next is {name}, {found.change}"
        is_better = (found.estimate or 0.0) * (1 if self.is_low else -1) < 0
        if self.kind is Kind.few:
            best = f"{name}, {found.change} against {base}" if is_better else base
            start = f"{found.why.capitalize()} each, so no difference in {found.name} is shown"
            return f"{start}; {which}: {best}; {self._advice(' sweep.seeds=per_repeat')}"
        start = f"No configuration is shown to be best; {which}"
        if found.parity is Parity.equal:
            return f"{start}: {base} and {name}, equal"
        text = f"{start}: {name if is_better else f'{base}, then {name}'}, {found.change}"
        text += f" with {format_number(found.seeds, 'seed')}"
        if more := found.more_seeds:
            text += f"; {more[0]} seeds would show {more[1]:g} {found.unit}".rstrip()
        return text

    def _of(self, kind: Kind) -> list[Claim]:
        """Return the claims of a kind in the same measure."""
        return [c for c in self.claims if c.kind is kind and c.measure == self.claim.measure]

    def _tied(self) -> list[ComparisonRow]:
        """Return the peers of the fastest that are also shown to be faster than the baseline."""
        if not self.claim.measure.is_speed:
            return []
        peers = [row for each in self._of(Kind.peers) for row in each.rows]
        return [row for row in peers if self._ratio(row).decision is Significance.higher]

    def _ratio(self, row: ComparisonRow) -> Ratio:
        return row.ratios[self.key]

    def _number(self, row: ComparisonRow) -> str:
        return row.quality.change if self.claim.measure.is_loss else times(self._ratio(row))

    def _worse(self) -> str:
        """Return the loss or metric for which a row was skipped: `higher eval loss`."""
        found = next(row.quality for row in self.rows if row.quality.excludes)
        return f"{found.word} {found.name}"

    def _more_repeats(self) -> str:
        """Return the repeats that would show a difference of speed, and their time, if known."""
        if self.part is None or self.base is None:
            return ""
        noise, base = self.part.noise[self.key], self.base.variant
        found = [noise.difference((base, row.variant)) for row in self.claim.rows]
        spreads = [each.error.spread for each in found if each and each.error]
        have = max((each.n for each in found if each), default=0)
        for size in (0.02, 0.05, 0.1, 0.2, 0.5) if spreads else ():
            level = self.part.level / len(spreads)
            needed = math.ceil(repeats_to_show(math.log1p(size), median(spreads), level))
            if have < needed <= MANY_SEEDS:
                more, good = needed - have, sum(bool(row.variant.records) for row in self.rows)
                repeats = format_number(more, "more repeat")
                return f"{repeats} ({self._cost(more * good)}) would show {100 * size:.0f} %"
        return ""

    def _advice(self, keys: str = "") -> str:
        """Return how to measure missing repeats. Single runs and `eke fit` need a new command."""
        ran = [[repeat for repeat, _ in row.variant.by_repeat()] for row in self.rows]
        counts = [len({seed for seed, _ in each}) if keys else len(each) for each in ran]
        held = zip(counts, (len(row.variant.sample(self.key)) for row in self.rows), strict=True)
        # Runs on shared devices have no speed, and the same repeats would return their records.
        most = MIN_REPEATS + max([0, *(n - have for n, have in held if have and not keys)])
        lacking = sum(max(0, most - count) for count in counts if count)
        keys = f"sweep.repeats={most}{keys}"
        if any("sweep.repeats=auto" in command for command in self.comparison.commands):
            return "the same command continues the sweep"
        if any(command[0] != "fit" for command in self.comparison.commands):
            return f"{keys} and the same command measures {self._cost(lacking)}"
        return f"{program()} -m with {keys} runs each {most} times"

    def _cost(self, runs: int) -> str:
        """Return a number of runs with their time, by finished runs."""
        timings = [record.timing for row in self.rows for record in row.variant.records]
        took = [(each.train_s or 0.0) + (each.startup_s or 0.0) for each in timings]
        seconds = runs * fmean(took) if took else 0.0
        return format_number(runs, "run") + (f", about {format_seconds(seconds)}" * bool(seconds))


def _name(row: ComparisonRow) -> str:
    """Return the name of a configuration, in quotes if it is a sweep row's name."""
    label = row.variant.label.removesuffix(f" [{row.variant.machine}]")  # the sentence's place
    return f'"{label}"' if row.variant.rows else label


def _joined(texts: Sequence[str]) -> str:
    more = [f"{len(texts) - _NAMED} more"] if len(texts) > _NAMED else []
    *rest, last = [*texts[:_NAMED], *more]
    return f"{', '.join(rest)} and {last}"


def _first_of(labels: Iterable[str]) -> str:
    every = list(labels)
    return _joined(every) if len(every) > _NAMED else ", ".join(every)
