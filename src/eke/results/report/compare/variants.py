"""Variants: the repeats of one configuration on one kind of machine."""

import hashlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from statistics import fmean

from eke.common.files import json_safe
from eke.config.schema.fields import Affects
from eke.plan.identity import canonical
from eke.plan.record import Outcome, Record
from eke.results.report.compare.load_records import (
    Entry,
    Factors,
    RunSettings,
    affects,
    configuration,
    key_of,
    settings_of,
    typed_settings,
)
from eke.results.report.compare.measures import BY_SEED, BY_STEP, measured_values, samples_per_step
from eke.results.report.compare.statistics import Sample

CLOCK = "step clock"
"""Key of `timing.clock` among a machine's facts: steps of two clocks are not compared."""


@dataclass(frozen=True, eq=False)
class Variant:
    """Configuration on one kind of machine, with its repeats. Equal only to itself."""

    entries: tuple[Entry, ...]
    machine: str
    """Letter of the machine, or empty if no run has started."""
    settings: Factors
    """All settings, or only the overrides without a record."""
    factors: Factors = field(default_factory=dict)
    """Settings in which variants differ."""
    told: Factors = field(default_factory=dict)
    """Items of `factors` that differ within its group."""
    label: str = ""
    """Values of `told` that differ from the baseline's, or a row's name."""
    implied: frozenset[str] = frozenset()
    """Keys of `factors` with their option's default."""
    work: str = ""
    """Name of its group (one model, task and data), or empty for a single one."""
    excluded: tuple[int, int, int] | None = None
    """Seed, repeat and duplicate number of the run whose speed is excluded: see `find_outliers`."""

    @property
    def first(self) -> Entry | None:
        """First repeat with a record."""
        return next((entry for entry in self.entries if entry.record), None)

    @property
    def row(self) -> str:
        """Name of the first sweep row with this configuration."""
        return next(iter(self.rows), "")

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of all sweep rows with this configuration."""
        return tuple(dict.fromkeys(name for entry in self.entries for name in entry.rows))

    @property
    def outcomes(self) -> dict[str, int]:
        """Outcome -> number of repeats."""
        return dict(Counter(entry.outcome for entry in self.entries))

    @cached_property
    def records(self) -> list[Record]:
        """Records of the successful repeats."""
        return [record for _, record in self.by_repeat()]

    @cached_property
    def _measured(self) -> dict[tuple[int, int, int], dict[str, float]]:
        """Seed, repeat and duplicate number -> measures of the successful repeats."""
        values: dict[tuple[int, int, int], dict[str, float]] = {}
        for repeat, record in self.by_repeat():
            again = sum(known[:2] == repeat for known in values)
            values[*repeat, again] = measured_values(record)
        return values

    def by_repeat(self) -> list[tuple[tuple[int, int], Record]]:
        """Return seed and repeat, and record of the successful repeats."""
        good = [entry for entry in self.entries if entry.outcome == Outcome.ok.name]
        return [(entry.repeat, entry.record) for entry in good if entry.record is not None]

    def sample(self, key: str) -> Sample:
        """Return the values of a measure by repeat, for the successful repeats that have it.

        Losses are by seed: the mean over its repeats, which are copies of one training.
        """
        found: dict[Hashable, list[float]] = {}
        by_seed = key.startswith(BY_SEED)
        for repeat, values in self._measured.items():
            if key in values and not (key in BY_STEP and repeat == self.excluded):
                found.setdefault(repeat[0] if by_seed else repeat, []).append(values[key])
        return {each: fmean(values) for each, values in found.items()}


def training_key(variant: Variant) -> Hashable:
    """Return a value that is equal for variants of one training, which differ only in rounding.

    Batches may be divided in other ways if a step has the same number of samples.
    """
    same = (Affects.rounding, Affects.none)
    learned = [pair for pair in variant.factors.items() if affects(pair[0], pair[1:]) not in same]
    return *learned, frozenset(map(samples_per_step, variant.records))


@dataclass(frozen=True)
class Machine:
    """Kind of machine."""

    letter: str
    facts: dict[str, str]
    """Fingerprint, and clock of the steps."""
    hosts: tuple[str, ...]
    sources: tuple[str, ...]
    """Hashes of eke's source."""


def group(entries: Sequence[Entry]) -> tuple[list[Variant], list[Machine], list[str]]:
    """Group entries: variants in order of first entry, machines, and differing keys."""
    machines = _find_machines(entries)
    letters = {_machine_key(m.facts): m.letter for m in machines}
    groups: dict[tuple[str, str], list[Entry]] = {}
    homes: dict[tuple[str, ...], tuple[str, str]] = {}
    # Entries without a record join the repeats with one, if any.
    for entry in sorted(entries, key=lambda entry: entry.record is None):
        typed = key_of(entry.overrides)
        key = "", str(entry.folder)
        if entry.record is not None:
            data = entry.record.plan.get("data_fingerprint", "")
            content = canonical(json_safe([configuration(entry.record.config), data]))
            content = hashlib.sha256(content.encode()).hexdigest()
            key = (letters[_machine_key(_facts(entry.record))], content)
            homes.setdefault(typed, key)
        elif entry.is_known:  # else its configuration may equal another one
            key = homes.setdefault(typed, ("", canonical(typed)))
        groups.setdefault(key, []).append(entry)
    order = {entry: number for number, entry in enumerate(entries)}
    found = []
    for (machine, _), members in groups.items():
        members.sort(key=order.__getitem__)
        record = next((entry.record for entry in members if entry.record), None)
        known = typed_settings(members[0].overrides) if members[0].is_known else {}
        known = settings_of(record.config, record.choices) if record else known
        found.append(Variant(tuple(members), machine, known))
    found.sort(key=lambda variant: order[variant.entries[0]])
    keys, variants = _described(found)
    return named(_grouped(variants)), machines, keys


def _find_machines(entries: Sequence[Entry]) -> list[Machine]:
    """Return the kinds of machines, in order of appearance: A, B, ..."""
    records: dict[str, list[Record]] = {}
    for entry in entries:
        if entry.record is not None:
            records.setdefault(_machine_key(_facts(entry.record)), []).append(entry.record)
    machines = []
    for number, found in enumerate(records.values()):
        hosts = dict.fromkeys(str(r.environment.get("host", "")) for r in found)
        sources = dict.fromkeys(r.machine.get("eke_source", "") for r in found)
        letter = chr(ord("A") + number) if number < 26 else f"M{number + 1}"
        machines.append(Machine(letter, _facts(found[0]), tuple(hosts), tuple(sources)))
    return machines


def _described(variants: Sequence[Variant]) -> tuple[list[str], list[Variant]]:
    """Return the keys in which variants differ, and the variants with their values."""
    firsts = {each: each.first for each in variants if each.first}
    known = RunSettings(
        [each.settings for each in firsts], [first.overrides for first in firsts.values() if first]
    )
    lone = [each for each in variants if not each.first and each.entries[0].is_known]
    # In the order of the overrides; keys that are never overridden last.
    typed = (typed_settings(each.entries[0].overrides) for each in variants)
    order = list(dict.fromkeys(key for each in typed for key in each))
    different = known.differing()
    every = known.complete(different, [each.settings for each in lone])
    every.sort(key=lambda key: order.index(key) if key in order else len(order))
    keys = [key for key in every if key in different] if firsts else every
    usual = {key: known.usual(key) for key in every}
    implied = dict(zip(firsts, known.implied(keys), strict=True))
    told = dict(zip(firsts, known.telling(keys), strict=True))
    found = []
    for each in variants:
        factors = {key: each.settings.get(key, "") for key in keys}
        if each in lone:
            factors = {key: each.settings.get(key, usual[key]) for key in every}
        own = implied.get(each, frozenset())
        found.append(replace(each, factors=factors, implied=own, told=told.get(each, factors)))
    return keys, found


def _grouped(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants with the names of their groups, and `told` within each group."""
    keys = dict.fromkeys(key for each in variants for key in each.factors)
    own = [key for key in keys if affects(key, ()) is Affects.group]
    drawn = [key for key in keys if key.startswith("data.") and key not in own]
    places = {v: tuple(v.factors.get(k, v.settings.get(k, "")) for k in own) for v in variants}
    for place in dict.fromkeys(places.values()):
        members = [each for each in variants if places[each] == place and each.first]
        data = {v: str(v.records[0].plan.get("data_fingerprint", "")) for v in members if v.records}
        pairs = {(tuple(v.factors.get(key, "") for key in drawn), data[v]) for v in data}
        if len(pairs) > len({values for values, _ in pairs}):  # other content under these keys
            places |= {each: (*place, f"data {data[each][:6]}") for each in data}
    known = {each: place for each, place in places.items() if each.first}
    for each in variants:  # one that never ran joins those that agree with its overrides
        typed = [(n, each.settings[key]) for n, key in enumerate(own) if key in each.settings]
        if not each.first:
            alike = (p for p in known.values() if all(p[n] == value for n, value in typed))
            places[each] = next(alike, places[each])
    every = list(dict.fromkeys(places.values()))
    columns = zip_longest(own, zip_longest(*every, fillvalue=""), fillvalue="")
    parts = _distinguishing_texts(
        len(every), ([_value(k, v) if v else "" for v in column] for k, column in columns)
    )
    names = {p: ", ".join(filter(None, part)) for p, part in zip(every, parts, strict=True)}
    if len(names) < 2:
        return list(variants)
    groups: dict[str, list[Variant]] = {}
    for each in variants:
        groups.setdefault(names[places[each]], []).append(each)
    told = {v.entries: v.told for members in groups.values() for v in _described(members)[1]}
    return [replace(v, work=names[places[v]], told=told[v.entries]) for v in variants]


def _distinguishing_texts(number: int, columns: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return texts of each row, of as few columns as distinguish all rows."""
    parts: list[tuple[str, ...]] = [()] * number
    for column in columns:
        longer = [(*part, text) for part, text in zip(parts, column, strict=True)]
        parts = longer if len(set(longer)) > len(set(parts)) else parts
    return parts


def named(variants: Sequence[Variant], baselines: Collection[Variant] = ()) -> list[Variant]:
    """Return the variants with labels: values that differ from the baseline's within the group.

    Without a baseline, the group's first variant counts. The order stays.
    """
    labels: dict[Variant, str] = {}
    groups: dict[tuple[str, str], list[Variant]] = {}
    for each in variants:
        groups.setdefault((each.work, each.machine), []).append(each)
    for (work, _), members in groups.items():
        near = [*members, *(each for each in variants if each.work == work)]
        labels |= _labels(members, next((v for v in near if v in baselines), near[0]))
    several = len({each.machine for each in variants if each.machine}) > 1
    ends = {v: f" [{v.machine}]" if several and v.machine else "" for v in variants}
    return [replace(each, label=f"{labels[each]}{ends[each]}") for each in variants]


def _labels(members: Sequence[Variant], base: Variant) -> dict[Variant, str]:
    """Return labels of one group: names of rows, else values, with keys if values are the same."""
    if members == [base] and base.work and not base.rows:
        return {base: base.work}
    labels: dict[Variant, str] = {}
    for each in members:
        told = {k: x for k, x in each.told.items() if x and (each is base or x != base.told.get(k))}
        labels[each] = _label(each, told, each is base)
    counts = Counter(labels.values())
    for each, label in labels.items():
        if counts[label] > 1 and not each.rows:
            pairs = [f"{key}={value}" for key, value in each.told.items() if value]
            labels[each] = " ".join(pairs) or label
    by_name: dict[str, list[Variant]] = {}
    for each in (each for each in members if each.rows):
        by_name.setdefault(labels[each], []).append(each)
    # Names of rows that several variants share are extended with their differing settings.
    for name, same in by_name.items():
        keys = dict.fromkeys(key for each in same for key in each.factors)
        texts = ([f"{k}={v.factors.get(k, v.settings.get(k, ''))}" for v in same] for k in keys)
        ends = zip(same, _distinguishing_texts(len(same), texts), strict=True)
        labels |= {v: f"{name}, {' '.join(part)}" for v, part in ends if part}
    return labels


_PLAIN = ("none", "auto", "on", "off", "true", "false", "null", "same", "default", "full", "fixed")
"""Values that mean little without their key."""


def _label(variant: Variant, told: Factors, is_base: bool) -> str:
    if variant.rows:
        return " = ".join(variant.rows)
    first = variant.entries[0]
    texts = [_value(key, value) for key, value in told.items() if value and first.is_known]
    # Of another row each value is a difference, also `peft=none` if the baseline has adapters.
    telling = [t for t in texts if not (is_base and t.endswith("=none"))] or texts
    folder = first.folder.name if first.folder else "run"
    return " + ".join(telling) or " ".join(key_of(first.overrides)) or folder


def _value(key: str, value: str) -> str:
    """Return a value, with the last part of its key unless it is a name."""
    is_name = value not in _PLAIN and (value[:1].isalpha() or not key)
    return value if is_name else f"{key.rpartition('.')[2]}={value}"


def _facts(record: Record) -> dict[str, str]:
    return {**record.machine, CLOCK: record.timing.clock or "former"}


def _machine_key(facts: dict[str, str]) -> str:
    # Repeats may differ in eke's source, with a note.
    return canonical({key: value for key, value in facts.items() if key != "eke_source"})
