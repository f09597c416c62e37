"""The one object that every picture, table and file of a report is made of.

What the others are compared with: said by the user, or the first that ended well.

How ratios and losses are told: one wording for terminal, page, Markdown and W&B.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import closest, format_number
from eke.results.report.compare.curves import (
    MARGIN,
    Curve,
    Parity,
    Quality,
    curve_of,
    quality,
    quiet_notes,
)
from eke.results.report.compare.effects import (
    Beside,
    Effect,
    Rung,
    alone,
    beside,
    ladder,
    main_effects,
    pareto,
)
from eke.results.report.compare.load_records import Gathered, gather
from eke.results.report.compare.measures import (
    MEASURES,
    PEAK,
    PREDICTED,
    PREDICTED_STEP,
    RESERVED,
    SAMPLES,
    STEP,
    Measure,
)
from eke.results.report.compare.statistics import (
    SAME,
    Compared,
    Decision,
    Estimate,
    Ratio,
    correct,
    estimate,
)
from eke.results.report.compare.variants import Machine, Variant, group

ROW = "baseline"
"""A row of this name is the baseline unless another is asked for."""


def choose(
    variants: Sequence[Variant], machines: Sequence[Machine], asked: str, keys: Sequence[str]
) -> tuple[dict[str, Variant], list[str]]:
    """The baseline of each machine, and what has to be said about the choice.

    Args:
        variants: all of them.
        machines: kinds of machines.
        asked: `key=value,...`, or the name of a row; empty for the default.
        keys: factors that differ.

    Raises:
        ConfigError: no configuration is meant by `asked`, or several on one machine.
    """
    meant = [v for v in variants if _is_meant(v, asked or ROW)]
    if asked and not meant:
        example = _example(variants)
        why = f"no run has it; what differs is {', '.join(keys) or 'nothing'}"
        raise ConfigError(Problem("--baseline", asked, why, Fix(remark=f"--baseline {example}")))
    chosen: dict[str, Variant] = {}
    notes: list[str] = []
    for machine in machines:
        here = [v for v in meant if v.machine == machine.letter]
        good = [v for v in here if v.records]
        if asked and len(here) > 1:
            why = f"{len(here)} configurations have it: {'; '.join(v.label for v in here[:4])}"
            fix = Fix(remark=f"--baseline {_spelled(here[0], keys, variants)}")
            raise ConfigError(Problem("--baseline", asked, why, fix))
        if good:
            chosen[machine.letter] = good[0]
            continue
        where = f" on machine {machine.letter}" if len(machines) > 1 else ""
        if here or asked:
            notes.append(
                f"the baseline did not end well{where}: nothing is compared with it"
                if here
                else f"the baseline did not run{where}: nothing is compared there"
            )
            if asked:
                continue
        first = next((v for v in variants if v.machine == machine.letter and v.records), None)
        if first is not None:
            chosen[machine.letter] = first
    return chosen, notes


def _is_meant(variant: Variant, asked: str) -> bool:
    # `eke fit` names its rows by what was changed, so a row's name may have a `=`, too.
    if "=" not in asked or asked in (*variant.rows, variant.label):
        return asked in (*variant.rows, variant.label)
    pairs = [part.partition("=")[::2] for part in asked.split(",")]
    return all(variant.settings.get(key.strip()) == value.strip() for key, value in pairs)


def _spelled(variant: Variant, keys: Sequence[str], variants: Sequence[Variant]) -> str:
    """What means this one alone, as a shell takes it."""
    if variant.row and sum(variant.row in each.rows for each in variants) == 1:
        return shlex.quote(variant.row)
    told: list[str] = []
    left = list(variants)
    for key in keys:
        value = variant.factors.get(key)
        narrower = [each for each in left if each.settings.get(key) == value]
        if value and len(narrower) < len(left):
            told, left = [*told, f"{key}={value}"], narrower
    return shlex.quote(",".join(told))


def _example(variants: Sequence[Variant]) -> str:
    first = next((v for v in variants if v.records), variants[0])
    spelled = _spelled(first, list(first.factors), variants)
    return spelled if spelled != shlex.quote("") else "KEY=VALUE"


COMPARED = (SAMPLES.key, "throughput.tokens_per_s", STEP.key, PEAK.key, RESERVED.key)
"""Measures with a ratio to the baseline."""

EFFECTS = (SAMPLES.key, PEAK.key)
"""Measures of which effects are told."""

MAX_CURVES = 200
"""Variants whose steps are read, the baseline and the front first."""


@dataclass(frozen=True)
class Row:
    """One configuration on one kind of machine, in numbers."""

    variant: Variant
    estimates: Mapping[str, Estimate]
    """Measure -> value over the repeats."""
    ratios: Mapping[str, Ratio]
    """Measure -> over the baseline; decisions corrected for their number."""
    quality: Quality
    is_baseline: bool = False
    on_front: bool = False
    phases: Mapping[str, float] = field(default_factory=dict)
    """Phase of a step -> its share."""
    curve: Curve | None = None
    loss_at_equal_time: float | None = None

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured tensors, less one."""
        return self._error(PREDICTED, PEAK)

    @property
    def step_prediction_error(self) -> float | None:
        """Predicted over measured time of a step, less one."""
        return self._error(PREDICTED_STEP, STEP)

    def _error(self, expected: Measure, measure: Measure) -> float | None:
        told, found = self.estimates.get(expected.key), self.estimates.get(measure.key)
        return told.value / found.value - 1 if told and found else None


@dataclass(frozen=True)
class OneMachine:
    """The comparison on one kind of machine; numbers of two are never put together."""

    machine: Machine
    baseline: Variant | None
    effects: tuple[Effect, ...] = ()
    alone: tuple[tuple[Variant, str], ...] = ()
    """Variants that differ from the baseline in one factor."""
    ladder: tuple[Rung, ...] = ()
    beside: tuple[Beside, ...] = ()
    """What others have published of the same rows."""
    noise: Mapping[str, Compared] = field(default_factory=dict)
    """Measure of COMPARED -> comparisons of any variants, named by their `id`."""
    equal_time_s: float | None = None
    """Steps' time of the shortest run with a curve: losses are compared there."""


@dataclass(frozen=True)
class Comparison:
    """All that a report says."""

    folders: tuple[str, ...]
    sweeps: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    factors: tuple[str, ...]
    """Keys that tell configurations apart."""
    shared: Mapping[str, str]
    """Group -> option that all have."""
    machines: tuple[OneMachine, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def compare(folders: Sequence[Path], baseline: str = "", by: str = "") -> Comparison:
    """Everything under some folders as one comparison.

    Args:
        folders: runs, sweeps, or folders of runs.
        baseline: `key=value,...` or a row's name; empty for the row `baseline`, or the first cell.
        by: tell the effects of this factor alone; empty for all.

    Raises:
        ConfigError: no run, no such baseline, no such factor.
    """
    gathered = gather(folders)
    variants, machines, keys = group(gathered.entries)
    chosen, notes = choose(variants, machines, baseline, keys)
    shown = _factors_of(by, keys)
    parts = [_on(m, chosen.get(m.letter), variants, shown, keys, gathered.sweeps) for m in machines]
    rows = {id(row.variant): row for _, found in parts for row in found}
    bare = [row if (row := rows.get(id(v))) else _bare(v) for v in variants]
    return Comparison(
        folders=tuple(map(str, folders)),
        sweeps=gathered.sweeps,
        commands=gathered.commands,
        factors=tuple(keys),
        shared=_shared(variants, keys),
        machines=tuple(part for part, _ in parts),
        rows=tuple(bare),
        notes=(
            *gathered.notes,
            *notes,
            *_notes(gathered, machines),
            *(
                text
                for part, _ in parts
                for text in quiet_notes(part.baseline, variants, part.noise)
            ),
        ),
    )


def _on(
    machine: Machine,
    baseline: Variant | None,
    variants: Sequence[Variant],
    shown: Sequence[str],
    keys: Sequence[str],
    sweeps: Sequence[str],
) -> tuple[OneMachine, list[Row]]:
    here = [v for v in variants if v.machine == machine.letter]
    good = [v for v in here if v.records]
    front = pareto(good)
    noise = {key: Compared({id(v): v.sample(key) for v in here}) for key in COMPARED}
    rows = [_row(v, baseline, v in front, noise) for v in here]
    rows = _corrected(rows)
    rows, moment = _with_curves(rows, [v for v in (baseline, *front, *good) if v])
    if baseline is None:
        return OneMachine(machine, None, noise=noise, equal_time_s=moment), rows
    # All factors part the pairs, whichever effects are shown.
    effects = main_effects(baseline, good, keys, {key: noise[key] for key in EFFECTS})
    others = [v for v in good if v is not baseline]
    part = OneMachine(
        machine,
        baseline,
        tuple(e for e in effects if e.factor in shown),
        tuple(alone(baseline, others)),
        tuple(ladder(baseline, others, {id(row.variant): row.ratios for row in rows})),
        tuple(beside(sweeps, good)),
        noise,
        moment,
    )
    return part, rows


def _row(
    variant: Variant, baseline: Variant | None, on_front: bool, noise: Mapping[str, Compared]
) -> Row:
    measured = {m.key: estimate(variant.sample(m.key)) for m in MEASURES}
    estimates = {key: each for key, each in measured.items() if each}
    compared = {} if baseline is None or variant is baseline else noise
    found = {key: each.ratio((id(baseline), id(variant))) for key, each in compared.items()}
    ratios = {key: each for key, each in found.items() if each}
    judged = Quality.unknown() if baseline is None else quality(baseline, variant)
    return Row(variant, estimates, ratios, judged, variant is baseline, on_front, _phases(variant))


def _bare(variant: Variant) -> Row:
    return Row(variant, {}, {}, Quality.unknown())


def _corrected(rows: Sequence[Row]) -> list[Row]:
    """Decisions that hold for all comparisons of a machine together."""
    decided = {
        key: correct({n: row.ratios[key] for n, row in enumerate(rows) if key in row.ratios})
        for key in COMPARED
    }
    return [
        replace(row, ratios={key: decided[key][n] for key in row.ratios})
        for n, row in enumerate(rows)
    ]


def _with_curves(rows: Sequence[Row], wanted: Sequence[Variant]) -> tuple[list[Row], float | None]:
    chosen = list({id(v): v for v in wanted}.values())[:MAX_CURVES]
    curves = {id(v): curve for v in chosen if (curve := curve_of(v))}
    if not curves:
        return list(rows), None
    moment = min(curve.end for curve in curves.values())
    return [
        replace(row, curve=curve, loss_at_equal_time=curve.at(moment))
        if (curve := curves.get(id(row.variant)))
        else row
        for row in rows
    ], moment


def _phases(variant: Variant) -> dict[str, float]:
    """Shares of a step, from the medians of each repeat's phases."""
    totals: dict[str, float] = {}
    for record in variant.records:
        if record.shared_device:
            continue
        for name, spread in record.timing.phases.items():
            totals[name] = totals.get(name, 0.0) + spread.median
    whole = sum(totals.values())
    return {name: seconds / whole for name, seconds in totals.items()} if whole else {}


def _factors_of(by: str, keys: Sequence[str]) -> Sequence[str]:
    if not by:
        return keys
    if by not in keys:
        why = f"does not tell these runs apart; what differs is {', '.join(keys) or 'nothing'}"
        fix = (
            Fix(remark=f"--by {closest(by, keys) or keys[0]}")
            if keys
            else Fix(remark="leave --by out")
        )
        raise ConfigError(Problem("--by", by, why, fix))
    return [by]


def _shared(variants: Sequence[Variant], keys: Sequence[str]) -> dict[str, str]:
    """Options of groups that all recorded variants have."""
    recorded = [v.settings for v in variants if v.machine]
    if not recorded:
        return {}
    return {
        key: value
        for key, value in recorded[0].items()
        if "." not in key and key not in keys and all(s.get(key) == value for s in recorded)
    }


def _notes(gathered: Gathered, machines: Sequence[Machine]) -> list[str]:
    notes = []
    if len(machines) > 1:
        names = ", ".join(f"{m.letter} ({m.facts.get('device', '?')})" for m in machines)
        notes.append(f"runs of {len(machines)} kinds of machines, never put together: {names}")
    for machine in machines:
        if len(machine.sources) > 1:
            count = format_number(len(machine.sources), "version")
            notes.append(f"machine {machine.letter}: measured with {count} of eke's own source")
        if len(machine.hosts) > 1:
            notes.append(f"machine {machine.letter}: {len(machine.hosts)} hosts of one kind")
    shared = sum(bool(e.record and e.record.shared_device) for e in gathered.entries)
    if shared:
        runs = format_number(shared, "run")
        notes.append(f"{runs} shared a device with others: no speed is taken from there")
    return notes


PERCENT = f"{100 * MARGIN:.0f} %"
"""The margin of losses, in words."""


def times(ratio: Ratio) -> str:
    """`2.31x (2.27 to 2.35)`; without an interval where there are too few repeats."""
    text = f"{_digits(ratio.value)}x"
    if ratio.low is None or ratio.high is None:
        return text
    low, high = _digits(ratio.low), _digits(ratio.high)
    return text if low == high else f"{text} ({low} to {high})"


def in_words(ratio: Ratio) -> str:
    """A ratio with what it says: `not resolved: 1.03x (0.99 to 1.07)`."""
    text = times(ratio)
    if ratio.decision is Decision.same:
        return f"the same within {100 * SAME:.0f} %: {text}"
    if ratio.decision is Decision.hint:
        return f"a hint, not resolved among so many comparisons: {text}"
    if ratio.decision in (Decision.higher, Decision.lower):
        return text
    return f"{ratio.decision.value}: {text}"


def mark(ratio: Ratio) -> str:
    """The decision as a sign beside a number."""
    return {
        Decision.higher: "+",
        Decision.lower: "-",
        Decision.same: "=",
        Decision.hint: "?",
        Decision.unresolved: "~",
        Decision.single: "",
    }[ratio.decision]


MARKS = (
    "+ higher, - lower, = the same within 2 %, ~ not resolved, "
    "? a hint that does not hold among so many comparisons, no sign: too few repeats"
)


def loss_words(quality: Quality) -> str:
    """The loss beside the baseline's, as the end of a sentence."""
    which = "eval loss" if quality.measure.startswith("loss.eval") else "train loss"
    if quality.parity is Parity.unknown:
        return "no loss to compare"
    if quality.parity is Parity.other:
        return f"losses not comparable ({quality.why})"
    if quality.parity is Parity.baseline:
        return "the baseline"
    change = f"{100 * (quality.difference or 0.0):+.2g} %"
    if quality.parity is Parity.equal:
        return f"{which} equal"
    if quality.parity is Parity.within:
        return f"{which} within {PERCENT} ({change})"
    if quality.parity is Parity.unresolved and quality.why:
        return f"{which} not compared: {quality.why} ({change})"
    if quality.parity is Parity.unresolved:
        return f"{which} not resolved within {PERCENT} ({change})"
    return f"{which} {quality.parity.value} ({change})"


def _digits(value: float) -> str:
    """Three digits that count, and never an exponent in the usual range."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3g}"
