"""Comparison of runs: baseline, ratios, effects and losses: the data of every report format."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import format_number, suggest_match
from eke.config.schema.fields import Affects
from eke.results.report.compare import effects as techniques
from eke.results.report.compare.curves import curves_of, quiet_notes
from eke.results.report.compare.effects import SAME_BYTES, Effect, PublishedMatch
from eke.results.report.compare.load_records import Entry, LoadedRecords, affects, gather, key_of
from eke.results.report.compare.losses import LossComparison, Parity, compare_losses
from eke.results.report.compare.measures import (
    BY_SEED,
    LOSS_NAMES,
    LOSSES,
    MEASURES,
    METRIC,
    PEAK,
    PREDICTED,
    PREDICTED_STEP,
    RESERVED,
    SAMPLE_SPEED,
    STEP_TIME,
    TOKEN_SPEED,
    Measure,
    is_better_lower,
    keys_by,
    samples_per_step,
)
from eke.results.report.compare.statistics import (
    ALPHA,
    SAME,
    Compared,
    Difference,
    Estimate,
    Ratio,
    Significance,
    correct_all,
    estimate,
    find_outliers,
)
from eke.results.report.compare.variants import CLOCK, Machine, Variant, group, named

_COMPARED = (SAMPLE_SPEED, TOKEN_SPEED, STEP_TIME, PEAK, RESERVED)
"""Measures with a ratio to the baseline."""


@dataclass(frozen=True, eq=False)
class ComparisonRow:
    """Numbers of one configuration on one kind of machine."""

    variant: Variant
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    """Measure -> mean over the repeats."""
    ratios: Mapping[str, Ratio] = field(default_factory=dict)
    """Measure -> ratio to the baseline, corrected for multiple comparisons."""
    quality: LossComparison = field(default_factory=LossComparison)
    """Comparison of the loss, or of the metric of `--by`."""
    is_baseline: bool = False
    on_front: bool = False
    phases: Mapping[str, float] = field(default_factory=dict)
    """Phase of a step -> fraction of its time."""
    loss_at_equal_time: float | None = None
    """Loss of the curve at the `equal_time_s` of `MachineComparison`."""
    speed: Measure = SAMPLE_SPEED
    """As of `MachineComparison`."""

    @property
    def prediction_error(self) -> float | None:
        """Relative error of the predicted peak memory."""
        return self._error(PREDICTED, PEAK)

    @property
    def step_prediction_error(self) -> float | None:
        """Relative error of the predicted step time."""
        return self._error(PREDICTED_STEP, STEP_TIME)

    def _error(self, expected: Measure, measure: Measure) -> float | None:
        before, after = self.estimates.get(expected.key), self.estimates.get(measure.key)
        return before.value / after.value - 1 if before and after else None


@dataclass(frozen=True)
class MachineComparison:
    """Comparison of one group on one kind of machine. Numbers of several are never combined."""

    machine: Machine
    baseline: Variant | None
    members: Sequence[Variant]
    """Configurations of the group, with the baseline."""
    work: str
    """Name of the group: one model, task and data, or empty for a single one."""
    keys: tuple[str, ...]
    """Keys in which its configurations differ."""
    focus: Affects
    """Class of these keys: *learning*, *rounding* or *both*."""
    speed: Measure
    """Tokens without padding if the samples of the configurations differ."""
    rows: tuple[ComparisonRow, ...] = ()
    effects: tuple[Effect, ...] = ()
    alone: tuple[tuple[ComparisonRow, str], ...] = ()
    """Rows that differ from the baseline in one factor, and this factor."""
    ladder: tuple[tuple[ComparisonRow, str], ...] = ()
    """Rows that each add settings to the previous one, and these settings."""
    published: tuple[PublishedMatch, ...] = ()
    noise: Mapping[str, Compared] = field(default_factory=dict)
    """Measure of COMPARED -> comparisons of variants."""
    equal_time_s: float | None = None
    """Training time at which losses are compared: the time of the shortest run with a curve."""
    notes: tuple[str, ...] = ()
    level: float = ALPHA
    """Chance of a false claim among the comparisons with the baseline."""

    @property
    def measures(self) -> Sequence[str]:
        """Keys of the losses, or of the speed, in which its configurations differ."""
        return LOSSES if self.focus is Affects.learning else (self.speed.key,)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Contents of a report."""

    folders: tuple[str, ...]
    sweeps: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    factors: tuple[str, ...]
    """Keys in which configurations differ."""
    shared: Mapping[str, str]
    """Group -> option common to all."""
    machines: tuple[MachineComparison, ...]
    rows: tuple[ComparisonRow, ...]
    notes: tuple[str, ...]
    metric: str = ""
    """Metric that ranks the configurations, or empty for the loss."""

    def suffix(self, part: MachineComparison) -> str:
        """Return group and machine for a title: `: tiny [A]`, or empty if there is only one."""
        letters = {each.machine.letter for each in self.machines}
        work = f": {part.work}" if part.work else ""
        return f"{work} [{part.machine.letter}]" if len(letters) > 1 else work


def compare_runs(folders: Sequence[Path], baseline: str = "", by: str = "") -> Comparison:
    """Compare all runs in some folders (ConfigError: no runs, unknown baseline, factor or metric).

    `baseline` is `key=value,...` or a row's name. Default: the row `baseline`, or the first run.
    `by` is a factor whose effects are shown, or a metric that ranks. Default: all, and the loss.
    """
    gathered = gather(folders)
    variants, machines, keys, notes, divided = _divided(gathered.entries, baseline)
    metrics = [n for n in LOSS_NAMES if any(v.sample(key) for v in variants for key in keys_by(n))]
    metrics += _metrics(variants)
    if by and by not in (known := [*keys, *metrics]):
        why = f"neither differs nor was measured; differing: {', '.join(keys) or 'nothing'}"
        why += f"; measured: {', '.join(metrics)}" if metrics else ""
        fix = Fix(remark=f"--by {suggest_match(by, known) or known[0]}" if known else "omit --by")
        raise ConfigError(Problem("--by", by, why, fix, "unknown_factor"))
    shown, metric = (by, "") if by in keys else ("", by)
    parts = [_on(each, shown, gathered, metric) for each in divided]
    recorded = [v.settings for v in variants if v.machine]
    return Comparison(
        folders=tuple(map(str, folders)),
        sweeps=gathered.sweeps,
        commands=gathered.commands,
        factors=tuple(keys),
        shared={
            key: value for key, value in (recorded[0] if recorded else {}).items()
            if "." not in key and key not in keys and all(s.get(key) == value for s in recorded)
        },
        machines=tuple(parts),
        rows=(
            *(row for part in parts for row in part.rows),
            *(ComparisonRow(v) for v in variants if not v.machine),
        ),
        notes=(
            *gathered.notes, *notes, *_notes(gathered, machines),
            *(note for part in parts for note in part.notes),
        ),
        metric=metric,
    )  # fmt: skip


def find_families(entries: Sequence[Entry]) -> list[MachineComparison]:
    """Return the groups with a baseline, as in a report, without comparing them."""
    return [part for part in _divided(entries, "")[-1] if part.baseline]


def _divided(
    entries: Sequence[Entry], wanted: str
) -> tuple[list[Variant], list[Machine], list[str], list[str], list[MachineComparison]]:
    """Return variants, machines, differing keys, notes, and groups that are not yet compared."""
    variants, machines, keys = group(entries)
    out: dict[Variant, tuple[int, int, int]] = {}
    for _, members in _group_by_machine(variants, machines):
        out |= find_outliers({v: v.sample(SAMPLE_SPEED.key) for v in members})
    variants = [replace(v, excluded=out[v]) if v in out else v for v in variants]
    chosen, notes = _choose_baselines(variants, machines, wanted, keys)
    labelled = dict(zip(variants, named(variants, chosen), strict=True))
    parts = []
    for machine, members in _group_by_machine(variants, machines):
        base = next((labelled[each] for each in chosen if each in members), None)
        own, work = [labelled[each] for each in members], members[0].work
        differing, focus = _focus(members)
        is_packed = "data.packing" in differing  # a packed row: several samples
        speed = TOKEN_SPEED if is_packed else SAMPLE_SPEED
        parts.append(MachineComparison(machine, base, own, work, tuple(differing), focus, speed))
    return list(labelled.values()), machines, keys, notes, parts


def _group_by_machine(
    variants: Sequence[Variant], machines: Sequence[Machine]
) -> list[tuple[Machine, list[Variant]]]:
    """Return the variants of each machine and group, the largest groups first."""
    found: list[tuple[Machine, list[Variant]]] = []
    for machine in machines:
        groups: dict[str, list[Variant]] = {}
        for each in variants:
            if each.machine == machine.letter:
                groups.setdefault(each.work, []).append(each)
        found += [(machine, each) for each in sorted(groups.values(), key=len, reverse=True)]
    return found


def _focus(variants: Sequence[Variant]) -> tuple[list[str], Affects]:
    """Return the keys in which variants of one group differ, and their class."""
    values: dict[str, set[str]] = {}
    for key in dict.fromkeys(key for each in variants for key in each.told):
        found = {each.factors.get(key, each.settings.get(key, "")) for each in variants}
        values |= {key: found} if len(found) > 1 else {}
    classes = {affects(key, found) for key, found in values.items()}
    if len({samples_per_step(record) for each in variants for record in each.records}) > 1:
        classes.add(Affects.both)
    classes &= {Affects.learning, Affects.rounding, Affects.both}
    focus = Affects.both if len(classes) > 1 else next(iter(classes), Affects.rounding)
    return list(values), focus


def _choose_baselines(
    variants: Sequence[Variant], machines: Sequence[Machine], wanted: str, keys: Sequence[str]
) -> tuple[list[Variant], list[str]]:
    """Choose at most one baseline for each group and machine, or raise ConfigError."""
    meant = [v for v in variants if _is_meant(v, wanted or "baseline")]
    if wanted and not meant:
        first = next((v for v in variants if v.records), variants[0])
        spelled = _spelled(first, list(first.factors), variants)
        example = spelled if spelled != shlex.quote("") else "KEY=VALUE"
        why = f"no run has it; differing: {', '.join(keys) or 'nothing'}"
        fix = Fix(remark=f"--baseline {example}")
        raise ConfigError(Problem("--baseline", wanted, why, fix, "unknown_baseline"))
    chosen: list[Variant] = []
    notes: list[str] = []
    for machine in machines:
        here = [v for v in meant if v.machine == machine.letter]
        where = f" on machine {machine.letter}" if len(machines) > 1 else ""
        if here and not any(v.records for v in here):
            notes.append(f"the baseline failed{where}: nothing is compared with it")
        elif wanted and not here:
            notes.append(f"the baseline did not run{where}: nothing is compared there")
    for machine, part in _group_by_machine(variants, machines):
        here = [v for v in meant if v in part]
        if wanted and len(here) > 1:
            why = f"{len(here)} configurations have it: {'; '.join(v.label for v in here[:4])}"
            fix = Fix(remark=f"--baseline {_spelled(here[0], keys, variants)}")
            raise ConfigError(Problem("--baseline", wanted, why, fix, "ambiguous_baseline"))
        good = [v for v in here if v.records]
        # In a group without the wanted baseline, which others of the machine have: its first one.
        if not wanted or (not here and any(v.machine == machine.letter for v in meant)):
            good = good or [v for v in part if v.records]
        chosen += good[:1]
    return chosen, notes


def _is_meant(variant: Variant, wanted: str) -> bool:
    # Rows of `eke fit` are named by their overrides, so a row's name may contain `=`.
    if "=" not in wanted or wanted in (*variant.rows, variant.label):
        return wanted in (*variant.rows, variant.label)
    pairs = [part.partition("=")[::2] for part in wanted.split(",")]
    return all(variant.settings.get(key.strip()) == value.strip() for key, value in pairs)


def _spelled(variant: Variant, keys: Sequence[str], variants: Sequence[Variant]) -> str:
    """Return a shell-quoted selector that matches only this variant."""
    if variant.row and sum(variant.row in each.rows for each in variants) == 1:
        return shlex.quote(variant.row)
    return shlex.quote(
        ",".join(f"{key}={value}" for key in keys if (value := variant.factors.get(key)))
    )


def _metrics(variants: Sequence[Variant]) -> list[str]:
    return list(dict.fromkeys(name for v in variants for r in v.records for name in r.metrics))


def _on(
    part: MachineComparison, shown: str, gathered: LoadedRecords, metric: str
) -> MachineComparison:
    """Compare one group's variants on one machine, with effects of `shown`, or of all factors."""
    here, baseline, speed = part.members, part.baseline, part.speed
    good = [v for v in here if v.records]
    compared = _COMPARED if speed is SAMPLE_SPEED else (TOKEN_SPEED, PEAK, RESERVED)
    noise = {m.key: Compared({v: v.sample(m.key) for v in here}) for m in compared}
    has_speeds = part.focus is not Affects.learning and len(good) > 1
    front = techniques.pareto(good, speed, noise[speed.key]) if has_speeds else []
    corrected = correct_all([_differences(v, baseline, noise) for v in here], gathered.level)
    losses = {}
    if baseline is not None:
        for v, ratios in zip(here, corrected, strict=True):
            _settle(ratios, baseline, v, speed.key, gathered)
        losses = compare_losses(baseline, here, metric, gathered.level)
    notes = [] if has_speeds else _unequal(corrected)
    drawn = list(dict.fromkeys(v for v in (baseline, *front, *good) if v))
    exclusive = {v: curves_of(v, 1, with_shared=False) for v in drawn[:200]}  # most important
    curves = {variant: found[0] for variant, found in exclusive.items() if found}
    moment = min((curve.seconds[-1] for curve in curves.values()), default=None)
    rows = [
        ComparisonRow(
            variant,
            _estimates(variant),
            ratios if has_speeds else {},
            losses.get(variant, LossComparison()),
            is_baseline=variant is baseline,
            on_front=variant in front,
            phases=_phases(variant),
            loss_at_equal_time=curves[variant].at(moment) if moment and variant in curves else None,
            speed=speed,
        )
        for variant, ratios in zip(here, corrected, strict=True)
    ]
    if metric or part.focus is Affects.learning:
        keys = keys_by(metric)
        sign = 1 if is_better_lower(keys[0]) else -1
        ranks = {r: [sign * r.estimates[k].value for k in keys if k in r.estimates] for r in rows}
        rows.sort(key=lambda row: (*ranks[row], math.inf)[0])  # rows without it last
    number = format_number(sum(len(v.records) for v in here), "run")
    notes += [
        f"1 of {number} excluded from the tests of speed: {v.label} with seed={v.excluded[0]} "
        f"repeat={v.excluded[1]}, whose other repeats are faster and agree"
        for v in here if v.excluded
    ]  # fmt: skip
    notes += quiet_notes(baseline, here, noise)
    part = replace(part, noise=noise, equal_time_s=moment, notes=tuple(notes), level=gathered.level)
    part = replace(part, rows=tuple(rows))
    return _with_effects(part, baseline, shown, gathered) if has_speeds and baseline else part


def _with_effects(
    part: MachineComparison, base: Variant, shown: str, gathered: LoadedRecords
) -> MachineComparison:
    """Add the effects of single techniques and of their combinations, and published ones."""
    by_variant = {row.variant: row for row in part.rows}
    good = [v for v in by_variant if v.records]
    tested = {v: row.ratios for v, row in by_variant.items()}
    noise = {m.key: part.noise[m.key] for m in (part.speed, PEAK)}
    tests = techniques.PairTests(noise, base, tested, part.level)
    # Pairs agree in all factors, including those not shown.
    effects = techniques.main_effects(good, part.keys, tests)
    others = [v for v in good if v is not base]
    alone, ladder = (
        tuple((by_variant[v], text) for v, text in found(base, others))
        for found in (techniques.single_factor_variants, techniques.cumulative_variants)
    )
    return replace(
        part,
        effects=tuple(e for e in effects if shown in ("", e.factor)),
        alone=alone,
        ladder=ladder,
        published=tuple(techniques.match_published(gathered.sweeps, good, tests)),
    )


def _settle(
    ratios: dict[str, Ratio], base: Variant, variant: Variant, speed: str, gathered: LoadedRecords
) -> None:
    """Keep a speed that `sweep.repeats=auto` resolved earlier, and bytes that never vary."""
    keys = [key_of(each.first.overrides) for each in (variant, base) if each.first]
    found, ratio = gathered.decided.get((keys[0], keys[-1])) if keys else None, ratios.get(speed)
    is_open = ratio and ratio.decision is Significance.unresolved
    if found and ratio and is_open and found.state.name in ("higher", "lower"):
        ends, decision = (found.low, found.high), Significance[found.state.name]
        value, level = found.value or ratio.value, found.level or gathered.level
        ratios[speed] = Ratio(value, *ends, found.repeats, decision, level, level)
    peak, sides = ratios.get(PEAK.key), [v.sample(PEAK.key).values() for v in (base, variant)]
    if peak is None or peak.decision is not Significance.single:
        return
    if all(max(each) <= min(each) * (1 + SAME_BYTES) for each in sides):
        decision = Significance.higher if peak.value > 1 else Significance.lower
        decision = Significance.same if abs(peak.value - 1) <= SAME else decision
        ratios[PEAK.key] = replace(peak, decision=decision)


def _unequal(ratios: Sequence[Mapping[str, Ratio]]) -> list[str]:
    """Return a note on resolved differences of speed if no key can cause one."""
    speeds = [each[SAMPLE_SPEED.key] for each in ratios if SAMPLE_SPEED.key in each]
    resolved = (Significance.higher, Significance.lower)
    values = [each.value for each in speeds if each.decision in resolved]
    if not values:
        return []
    value = max(values, key=lambda value: abs(math.log(value)))
    return [f"speeds of equal work differ by {_digits(value)}x: the machine was not quiet"]


def _estimates(variant: Variant) -> dict[str, Estimate]:
    keys = [*(m.key for m in MEASURES), *(f"{METRIC}{name}" for name in _metrics([variant]))]
    found = {key: estimate(variant.sample(key), not key.startswith(BY_SEED)) for key in keys}
    return {key: each for key, each in found.items() if each}


def _differences(
    variant: Variant, baseline: Variant | None, noise: Mapping[str, Compared]
) -> dict[str, Difference]:
    if baseline is None or variant is baseline:
        return {}
    found = {key: each.difference((baseline, variant)) for key, each in noise.items()}
    return {key: each for key, each in found.items() if each}


def _phases(variant: Variant) -> dict[str, float]:
    """Return fractions of a step, from the medians of each repeat's phases."""
    totals: dict[str, float] = {}
    for record in (each for each in variant.records if not each.shared_device):
        for name, spread in record.timing.phases.items():
            totals[name] = totals.get(name, 0.0) + spread.median
    whole = sum(totals.values())
    return {name: seconds / whole for name, seconds in totals.items()} if whole else {}


def _notes(gathered: LoadedRecords, machines: Sequence[Machine]) -> list[str]:
    notes = []
    if len(machines) > 1:
        names = ", ".join(f"{m.letter} ({m.facts.get('device', '?')})" for m in machines)
        notes.append(f"runs of {len(machines)} kinds of machines, compared separately: {names}")
    for key in dict.fromkeys(key for machine in machines for key in machine.facts):
        values = {m.letter: m.facts.get(key, "without") for m in machines}
        if key not in ("device", "eke_source") and len({*values.values()}) > 1:
            shown = ", ".join(f"{letter} {value}" for letter, value in values.items())
            why = "; former: without the time between steps. Run older runs again" * (key == CLOCK)
            notes.append(f"machines differ in {key}: {shown}{why}")
    for machine in machines:
        if len(machine.sources) > 1:
            count = format_number(len(machine.sources), "version")
            notes.append(f"machine {machine.letter}: measured with {count} of eke's own source")
        if len(machine.hosts) > 1:
            notes.append(f"machine {machine.letter}: {len(machine.hosts)} hosts of one kind")
    if shared := sum(bool(e.record and e.record.shared_device) for e in gathered.entries):
        notes.append(f"{format_number(shared, 'run')} shared a device: their speeds are ignored")
    return notes


def times(ratio: Ratio) -> str:
    """Format a ratio, with its interval if any: `2.31x (2.27 to 2.35)`."""
    text = f"{_digits(ratio.value)}x"
    if ratio.low is None or ratio.high is None:
        return text
    low, high = _digits(ratio.low), _digits(ratio.high)
    return text if low == high else f"{text} ({low} to {high})"


def loss_words(quality: LossComparison) -> str:
    """Return the comparison of the loss with the baseline's, as the end of a sentence."""
    which, parity = quality.name, quality.parity
    if parity in (Parity.better, Parity.worse):
        return f"{which} {quality.word}: {quality.change}"
    plain = {
        Parity.baseline: "the baseline",
        Parity.unknown: "no loss to compare",
        Parity.other: f"losses not comparable ({quality.why})",
        Parity.equal: f"{which} equal",
        Parity.few: f"losses not compared: {quality.why} (sweep.seeds=per_repeat)",
    }
    if parity in plain:
        return plain[parity]
    if parity is not Parity.undecided:
        return f"{which} {quality.word} ({quality.interval})"
    text = f"{which} not decided: {quality.interval} with {format_number(quality.seeds, 'seed')}"
    if more := quality.more_seeds:
        text += f" ({more[0]} seeds would show {more[1]:g} {quality.unit}".rstrip() + ")"
    return text


def _digits(value: float) -> str:
    """Format with three significant digits, without an exponent in the usual range."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3g}"
