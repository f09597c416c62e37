"""The one object that every picture, table and file of a report is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from eke.common.did_you_mean import closest
from eke.common.errors import ConfigError, Problem
from eke.common.units import format_number
from eke.results.report.compare.baseline import choose
from eke.results.report.compare.curves import Curve, curve_of
from eke.results.report.compare.effects import Effect, Rung, alone, ladder, main_effects
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
from eke.results.report.compare.noise import Compared
from eke.results.report.compare.pareto import pareto
from eke.results.report.compare.parity import Quality, quality
from eke.results.report.compare.published_effects import Beside, beside
from eke.results.report.compare.quiet import quiet_notes
from eke.results.report.compare.statistics import Estimate, Ratio, correct, estimate
from eke.results.report.compare.variants import Machine, Variant, group

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
        fix = f"--by {closest(by, keys) or keys[0]}" if keys else "leave --by out"
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
