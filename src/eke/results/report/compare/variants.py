"""Variants: the repeats of one configuration on one kind of machine."""

import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from eke.common.files import plain
from eke.config.schema.fields import Affects
from eke.plan.identity import canonical
from eke.plan.record import Outcome, Record
from eke.results.report.compare.keys import affects
from eke.results.report.compare.load_records import (
    Entry,
    Factors,
    Settings,
    configuration,
    settings,
    typed_settings,
)
from eke.results.report.compare.measures import BY_SEED, BY_STEP, measured_values, samples_per_step
from eke.results.report.compare.statistics import Sample

NO_MACHINE = ""
"""Machine of a cell that never ran."""

LOOSE = ("eke_source",)
"""Fingerprint keys in which repeats may differ; a note reports it."""

CLOCK = "step clock"
"""`timing.clock` among a machine's facts: steps of two clocks are not compared."""


@dataclass(frozen=True, eq=False)
class Variant:
    """One configuration on one kind of machine, with its repeats; equal to itself alone."""

    entries: tuple[Entry, ...]
    machine: str
    """A letter; empty for cells that never ran."""
    settings: Factors
    """All settings; without a record, only the overrides."""
    factors: Factors
    """The settings in which variants differ."""
    label: str
    implied: frozenset[str] = frozenset()
    """Keys of `factors` with their option's default."""
    excluded: tuple[int, int, int] | None = None
    """Seed, repeat and duplicate number of the run without a speed: see `outliers`."""

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

    @property
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
        """Seed, repeat and record of the successful repeats."""
        return [
            (entry.repeat, entry.record)
            for entry in self.entries
            if entry.record is not None and entry.outcome == Outcome.ok.name
        ]

    def sample(self, key: str) -> Sample:
        """Repeat -> value of a measure, for the successful repeats that have it.

        For losses: seed -> mean over its repeats, which are copies of one training.
        """
        found: dict[Hashable, list[float]] = {}
        by_seed = key.startswith(BY_SEED)
        for repeat, values in self._measured.items():
            if key in values and not (key in BY_STEP and repeat == self.excluded):
                found.setdefault(repeat[0] if by_seed else repeat, []).append(values[key])
        return {each: fmean(values) for each, values in found.items()}


def training_key(variant: Variant) -> Hashable:
    """Equal for variants of one training: they differ only in keys of class *rounding*.

    Batches may be divided in other ways if a step has the same number of samples.
    """
    same = (Affects.rounding, Affects.none)
    learned = [pair for pair in variant.factors.items() if affects(pair[0], pair[1:]) not in same]
    return *learned, frozenset(map(samples_per_step, variant.records))


@dataclass(frozen=True)
class Machine:
    """One kind of machine."""

    letter: str
    facts: dict[str, str]
    """The fingerprint, and the clock of the steps."""
    hosts: tuple[str, ...]
    sources: tuple[str, ...]
    """Hashes of eke's source."""


def group(entries: Sequence[Entry]) -> tuple[list[Variant], list[Machine], list[str]]:
    """Group entries: variants in order of first entry, machines, and differing keys."""
    machines = find_machines(entries)
    letters = {_machine_key(m.facts): m.letter for m in machines}
    groups: dict[tuple[str, str], list[Entry]] = {}
    homes: dict[tuple[str, ...], tuple[str, str]] = {}
    # Those without a record join the repeats with one, if any.
    for entry in sorted(entries, key=lambda entry: entry.record is None):
        if entry.record is not None:
            data = entry.record.plan.get("data_fingerprint", "")
            content = canonical(plain([configuration(entry.record.config), data]))
            content = hashlib.sha256(content.encode()).hexdigest()
            key = (letters[_machine_key(_facts(entry.record))], content)
            homes.setdefault(_typed(entry), key)
        elif entry.is_known:
            key = homes.setdefault(_typed(entry), (NO_MACHINE, canonical(_typed(entry))))
        else:  # its configuration may equal another one
            key = NO_MACHINE, str(entry.folder)
        groups.setdefault(key, []).append(entry)
    order = {entry: number for number, entry in enumerate(entries)}
    for members in groups.values():
        members.sort(key=order.__getitem__)
    keys, variants = _describe(groups)
    variants.sort(key=lambda variant: order[variant.entries[0]])
    return variants, machines, keys


def find_machines(entries: Sequence[Entry]) -> list[Machine]:
    """Kinds of machines, in order of appearance: A, B, ..."""
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


def _describe(groups: dict[tuple[str, str], list[Entry]]) -> tuple[list[str], list[Variant]]:
    firsts = {
        key: (entry.record, entry.overrides)
        for key, members in groups.items()
        for entry in reversed(members)
        if entry.record
    }
    found = {key: settings(record) for key, (record, _) in firsts.items()}
    known = Settings(list(found.values()), [overrides for _, overrides in firsts.values()])
    typed = {key: typed_settings(members[0].overrides) for key, members in groups.items()}
    lone = {k: typed[k] for k, es in groups.items() if k not in found and es[0].is_known}
    # In the order of the overrides; those never overridden last.
    order = list(dict.fromkeys(key for each in typed.values() for key in each))
    different = known.differing()
    named_keys = sorted(
        known.complete(different, list(lone.values())),
        key=lambda key: order.index(key) if key in order else len(order),
    )
    keys = [key for key in named_keys if key in different] if found else named_keys
    defaults = {key: known.usual(key) for key in named_keys}
    brought = dict(zip(found, known.implied(keys), strict=True))
    told = dict(zip(found, known.telling(keys), strict=True))
    variants = []
    for key, members in groups.items():
        all_settings = found.get(key, lone.get(key, {}))
        factors = {k: all_settings.get(k, "") for k in keys}
        if key in lone:
            factors = {k: all_settings.get(k, defaults[k]) for k in named_keys}
        label, own = _label(members, told.get(key, factors)), brought.get(key, frozenset())
        variants.append(Variant(tuple(members), key[0], all_settings, factors, label, own))
    variants = _rows_apart(variants, named_keys)
    several = len({machine for machine, _ in groups if machine}) > 1
    ends = {v.machine: f" [{v.machine}]" if several and v.machine else "" for v in variants}
    return keys, [replace(v, label=f"{v.label}{ends[v.machine]}") for v in variants]


def _rows_apart(variants: Sequence[Variant], keys: Sequence[str]) -> list[Variant]:
    """Extend labels shared by several variants with the settings in which they differ."""
    by_name: dict[str, list[Variant]] = {}
    for variant in variants:
        by_name.setdefault(variant.label if variant.rows else "", []).append(variant)
    labels: dict[Variant, str] = {}
    for name, same in by_name.items():
        parts: list[tuple[str, ...]] = [()] * len(same if name else ())
        for key in keys:
            values = [v.factors.get(key, v.settings.get(key, "")) for v in same]
            longer = [(*p, f"{key}={v}") for p, v in zip(parts, values, strict=False)]
            # Skip keys that distinguish no further variants.
            parts = longer if len(set(longer)) > len(set(parts)) else parts
        labels |= {v: f", {' '.join(p)}" for v, p in zip(same, parts, strict=False) if p}
    return [replace(v, label=f"{v.label}{labels.get(v, '')}") for v in variants]


def _label(members: Sequence[Entry], telling_factors: Factors) -> str:
    if rows := dict.fromkeys(name for entry in members for name in entry.rows):
        return " = ".join(rows)
    first = members[0]
    factors = [f"{k}={value}" for k, value in telling_factors.items() if value and first.is_known]
    folder = first.folder.name if first.folder else "run"
    return " ".join(factors) or " ".join(_typed(first)) or folder


def _typed(entry: Entry) -> tuple[str, ...]:
    """Overrides without the keys of repeats."""
    return tuple(text for text in entry.overrides if not text.startswith(("repeat=", "seed=")))


def _facts(record: Record) -> dict[str, str]:
    return {**record.machine, CLOCK: record.timing.clock or "former"}


def _machine_key(facts: dict[str, str]) -> str:
    return canonical({key: value for key, value in facts.items() if key not in LOOSE})
