"""Comparison of two sides, A and B: differences, speed, memory and loss of each row, slowdowns.

Speeds are tested by Student's t with one variance for both sides, unpaired: runs measured in turns
(A B B A) cancel a steady drift, and pairs would halve the degrees of freedom. From four rows on the
variance is moderated (`statistics.Noise`), and the variance of the rounds is added to it, since A
and B have different rounds. benchmarks/compare_power.py measures errors and power.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.paths import program, user_path
from eke.common.text import format_number, format_seconds, format_value, suggest_match
from eke.config.schema.fields import Affects
from eke.plan.identity import FORMER_GROUPS, FORMER_VALUES, canonical
from eke.plan.record import Outcome, Record, table
from eke.plan.record.find_folder import find_folder
from eke.results.report.compare import statistics
from eke.results.report.compare.comparison import compare_runs
from eke.results.report.compare.load_records import (
    ABSENT,
    Entry,
    RunSettings,
    affects,
    gather,
    key_of,
    settings_of,
)
from eke.results.report.compare.losses import LossComparison, compare_losses
from eke.results.report.compare.measures import PEAK, SAMPLE_SPEED, TOKEN_SPEED, Measure, ended_s
from eke.results.report.compare.statistics import GRID, MIN_REPEATS, Difference, Error, Ratio
from eke.results.report.compare.variants import CLOCK, Variant, group

TURNS, APART = 0.03, 0.05
"""Default tolerance of sides measured in turns, and of others: if two occasions differ by 2 %, 5 %
of comparisons are false alarms, however many repeats there are (Kalibera & Jones 2013,
https://doi.org/10.1145/2464157.2464160, and simulated)."""

MEAN, AND = "mean", " and "


def differences(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]
) -> dict[int | str, Difference]:
    """Return the logarithm of B / A for each row and, with several rows, their mean (key MEAN).

    `a` and `b` have the speeds of each row's runs, three or more, in the order of measurement. The
    k-th runs of all rows of a side are a round: what disturbs one also disturbs the others.
    """
    rows, shapes = len(a), [max(map(len, side)) for side in (a, b)]
    logs = np.full((sum(shapes), 2 * rows), np.nan)  # a round of A has no value of B
    for column, speeds in enumerate([*a, *b]):
        start = shapes[0] if column >= rows else 0
        logs[start : start + len(speeds), column] = np.log(speeds)
    means, counts = np.nanmean(logs, axis=0), (~np.isnan(logs)).sum(0)
    rest, changes = logs - means, means[rows:] - means[:rows]
    inverse, per_rounds = 1 / counts[:rows] + 1 / counts[rows:], sum(1 / each for each in shapes)
    freedom, one = sum(shapes) - 2, np.ones(1)
    # Variance of the mean of all rows, from the means of the rounds.
    together = float((np.nanmean(rest, axis=1) ** 2).sum()) / freedom * per_rounds
    noise = statistics.Noise(logs) if rows >= statistics.MIN_ROWS else None
    sums = [noise.sums([n, rows + n]) if noise else one for n in range(rows)]
    own = [np.exp(GRID) * noise.scale * each / 2 for each in inverse] if noise else []
    # The rows' own noise explains a part of it. The rest is noise that the rows of a round share.
    known = fmean(float(s @ o) for s, o in zip(sums, own, strict=True)) if noise else 0.0
    shared = max(0.0, together - known / rows)
    found: dict[int | str, Difference] = {}
    for n in range(rows):
        runs = counts[n] + counts[rows + n] - 2
        total = one * float(np.nansum(rest[:, [n, rows + n]] ** 2)) / runs * inverse[n]
        if noise:
            # Degrees of freedom by Satterthwaite. Only the shared noise has few.
            total = own[n] + shared
            runs = total**2 * freedom / shared**2 if shared else np.inf
        least = int(min(counts[n], counts[rows + n]))
        found[n] = Difference(float(changes[n]), least, Error(total, sums[n], runs, least))
    if rows > 1:
        error = Error(one * together, one, freedom, min(shapes))
        found[MEAN] = Difference(float(changes.mean()), min(shapes), error)
    return found


def is_slowdown(speed: Ratio, tolerance: float) -> bool:
    """Return whether a speed is shown to be lower, by an estimate beyond the tolerance."""
    is_lower = speed.decision is statistics.Significance.lower
    return is_lower and speed.value < 1 - tolerance


_ELSEWHERE = ("driver", "cuda_driver", "host")
"""Facts of a machine that are not facts of an installation."""
HARDWARE, CONTENT = ("device", "device_count", CLOCK), "content of the data"


@dataclass(frozen=True)
class Side:
    """Runs that one argument of the command names."""

    name: str
    entries: Sequence[Entry]
    command: Sequence[str] = ()
    """Arguments of their sweep, or empty for runs of no sweep, or of several."""

    @property
    def measuring(self) -> str:
        """Command that measures these runs, each three times."""
        is_whole = len(self.entries) > 1 and "@" not in self.name
        words = (is_whole and self.command) or ("-m", *overrides_of(self.entries[0]))
        kept = [word for word in words if not word.startswith("sweep.repeats=")]
        return f"{program()} {shlex.join([*kept, f'sweep.repeats={MIN_REPEATS}'])}"


def overrides_of(entry: Entry) -> list[str]:
    """Return the overrides of a run, without repeat and seed."""
    return [text.lstrip("+") for text in key_of(entry.overrides)]


def open_sides(words: Sequence[str], by: str = "") -> list[Side]:
    """Return A and B. With `by`, `torch` or `torch=OLD,NEW`, the runs of one word by this value.

    A word is a run, a sweep, a folder of runs, or `FOLDER@WHICH`. WHICH is the name of a row, or
    one or more of `key=value`, `changed`, a commit of eke and the hash of its source, each from
    four digits on (ConfigError: no such runs, or not two values).
    """
    if not by:
        return [_open_side(word, words, n) for n, word in enumerate(words)]
    key, _, wanted = by.partition("=")
    entries = sorted(_open_side(words[0], words, 0).entries, key=_end)
    known = [_values(entry.record) for entry in entries if entry.record]
    values = dict.fromkeys(each[key] for each in known if key in each)
    chosen = wanted.split(",") if wanted else [*values]
    if len(chosen) != 2 or not set(chosen) <= set(values):
        every = dict.fromkeys(name for each in known for name in each)
        names = [name for name in every if len({each.get(name) for each in known}) > 1]
        fix = f"{key}={','.join([*values][-2:])}" if len(values) > 1 else ""
        fix = fix or suggest_match(key, names) or next(iter(names), "NAME")
        why = f"two values are compared, the runs have {', '.join(values) or 'none'}"
        example = Fix(remark=f"--by {shlex.quote(fix)}")
        raise ConfigError(Problem("--by", by, why, example, "unknown_factor"))
    return [_open_side(f"{words[0]}@{key}={each}", words, 0) for each in chosen]


def _open_side(word: str, words: Sequence[str], place: int) -> Side:
    """Return the side of one word, the one at `place`."""
    places = (word, "", ""), word.rpartition("@"), word.partition("@")  # names may have an @
    known_places = (each for each in places if each[0] and user_path(each[0]).exists())
    path, _, which = next(known_places, places[2])
    folder = find_folder(path, "A B")

    def instead(meant: str) -> Fix:
        command = ["eke", "compare", *words[:place], meant, *words[place + 1 :]]
        return Fix(remark=shlex.join(command))

    try:
        found = gather([folder])
    except ConfigError as error:
        raise ConfigError([
            replace(each, fix=instead(each.fix.remark.removeprefix("eke report ")))
            for each in error.problems
        ]) from error  # fmt: skip
    entries = [e for e in found.entries if not which or which in e.rows]
    records = {e: e.record for e in found.entries if e.record}
    if not entries:
        parts = which.split(",")
        entries = [e for e, record in records.items() if all(_has_value(record, p) for p in parts)]
    shown: dict[str, list[Entry]] = {}
    if not entries:  # names of configurations and groups as `eke report` shows them
        for variant in (row.variant for row in compare_runs([folder]).rows):
            for name in dict.fromkeys(filter(None, [variant.label, variant.work])):
                shown.setdefault(name, []).extend(variant.entries)
        entries = shown.get(which, [])
    if not entries:
        rows = list(dict.fromkeys(name for entry in found.entries for name in entry.rows) or shown)
        commits = dict.fromkeys(_facts(record)["commit"] for record in records.values())
        why = f"matches no run. Rows: {', '.join(rows)}. Commits: {', '.join(commits) or 'none'}"
        names = [*(commit.split()[0] for commit in commits), *rows]
        fix = instead(f"{path}@{suggest_match(which, names) or next(iter(names), 'KEY=VALUE')}")
        raise ConfigError(Problem("FOLDER@WHICH", word, why, fix, "no_runs"))
    return Side(word, entries, found.commands[0] if len(found.commands) == 1 else ())


def _has_value(record: Record, which: str) -> bool:
    """Return whether a record has this commit, source, state, setting or fact."""
    key, is_pair, value = which.partition("=")
    if is_pair:
        return _values(record).get(key.strip()) == value.strip()
    git = table(record.environment, "git")
    hashes = str(git.get("commit", "")), record.machine.get("eke_source", "")
    is_hash = len(which) >= 4 and any(each.startswith(which) for each in hashes)
    return is_hash or (which == "changed" and bool(git.get("dirty")))


def _values(record: Record) -> dict[str, str]:
    return {**settings_of(record.config, record.choices), **_facts(record)}


def _facts(record: Record) -> dict[str, str]:
    """Return facts of a run's surroundings: commit of eke, versions, driver, host."""
    git, source = table(record.environment, "git"), record.machine.get("eke_source", "")[:8]
    commit = str(git.get("commit", ""))[:8]
    changed = f"{commit} changed ({source})" if commit else f"source {source}"
    return {
        "commit": changed if git.get("dirty") or not commit else commit,
        **{k: v for k, v in record.machine.items() if k not in (*HARDWARE, "eke_source")},
        **{k: str(v) for k, v in table(record.environment, "versions").items()},
        **{k: str(record.environment[k]) for k in _ELSEWHERE if record.environment.get(k)},
    }


def _end(entry: Entry) -> float:
    """Return when a run ended, in seconds, or 0 if unknown."""
    return (entry.record and ended_s(entry.record)) or 0.0


@dataclass(frozen=True)
class _Pair:
    """Row: a configuration, or one of each side, as measured on A and on B."""

    variants: tuple[Variant, Variant]
    runs: Sequence[list[Entry]]
    """Runs of each side with a speed, in the order of measurement."""
    loss: LossComparison
    speed: Ratio | None = None
    """B over A, or None with fewer than three repeats."""

    @property
    def oldest(self) -> list[Entry]:
        """First run of each side, which later measurements do not change."""
        return [min((e for e in v.entries if e.record), key=_end) for v in self.variants]

    @property
    def label(self) -> str:
        """Name of the configuration of B, with its group if there are several."""
        label, work = self.variants[1].label, self.variants[1].work
        return f"{label} of {work}" if work not in ("", label) else label

    @property
    def repeats(self) -> str:
        """Numbers of runs with a speed, and outcomes of the others."""
        ends = dict.fromkeys(end for each in self.variants for end in each.outcomes)
        others = [end for end in ends if end != Outcome.ok.name]
        return ", ".join([AND.join(str(len(side)) for side in self.runs), *others])

    @property
    def memory(self) -> float | None:
        """Ratio of the peaks, B over A."""
        a, b = ([x for e in side if (x := e.measures.get(PEAK.key))] for side in self.runs)
        return fmean(b) / fmean(a) if a and b else None


@dataclass(frozen=True)
class TwoSides:
    """Comparison of B with A."""

    sides: Sequence[Side]
    keys: dict[str, tuple[str, str]]
    """Key in which all configurations of the sides differ -> value of A and of B."""
    facts: dict[str, tuple[str, str]]
    """Fact of the surroundings -> value of A and of B."""
    rows: Sequence[_Pair]
    mean: Ratio | None
    """Mean ratio of the speeds of several rows."""
    measure: Measure
    tolerance: float
    in_turns: bool
    notes: Sequence[str]

    @property
    def is_measurable(self) -> bool:
        """True if one installation can measure both sides: only configurations differ."""
        pairs = self._installed.values()
        return bool(self.keys) and all({*a.split(AND)} & {*b.split(AND)} for a, b in pairs)

    @property
    def _installed(self) -> dict[str, tuple[str, str]]:
        return {name: v for name, v in self.facts.items() if name not in _ELSEWHERE}

    @property
    def measuring(self) -> str:
        """Commands that measure both sides, with the versions of each."""
        if self.is_measurable:
            return f"{shlex.join(['eke', 'compare', *(s.name for s in self.sides)])} --again"
        commands = []
        for n, side in enumerate(self.sides):
            own = [f"{name} {v[n]}" for name, v in self._installed.items()]
            commands.append(f"with {', '.join(own)}: {side.measuring}" if own else side.measuring)
        return "; ".join(dict.fromkeys(commands))

    @property
    def problem(self) -> Problem | None:
        """Problem of rows with too few repeats."""
        lacking = [f"{row.label} ({row.repeats})" for row in self.rows if not row.speed]
        why = f"fewer than {MIN_REPEATS} repeats with a speed: {', '.join(lacking)}"
        found = Problem("A B", "", why, Fix(remark=self.measuring), "too_few_repeats")
        return found if lacking else None


def compare_sides(sides: Sequence[Side], tolerance: float | None = None) -> TwoSides:
    """Compare the rows of A and B by configuration, without the runs that are in both.

    Keys with one value in A and another one in B are compared and need not match (ConfigError: the
    same runs, other work, or no row in both).
    """
    names = " ".join(side.name for side in sides)
    a, b = ({repr(entry.record) for entry in side.entries if entry.record} for side in sides)
    sides = [
        replace(s, entries=[e for e in s.entries if repr(e.record) not in a & b]) for s in sides
    ]
    found = [_described(side.entries) for side in sides]
    if not all(found):
        why = "all runs of one side are also in the other" if a & b else "a side has no record"
        fix = Fix(remark="eke compare FOLDER --by NAME, or FOLDER@ROW FOLDER@ROW")
        raise ConfigError(Problem("A B", names, why, fix, "same_runs"))
    keys, rows = _matched(found)
    shared = [key for key in rows[0] if key in rows[1]]
    work = [
        k for k, v in keys.items() if k in (*HARDWARE, CONTENT) or affects(k, v) is Affects.group
    ]
    why = "" if shared else "no configuration is in both"
    if any(len(row) < len(each) for row, each in zip(rows, found, strict=True)) and shared:
        why = "a configuration has runs of several versions; --by NAME=OLD,NEW takes two"
    if work:
        changes = ", ".join(f"{key} {' -> '.join(keys[key])}" for key in work)
        why = f"the work is not the same: {changes}"
    if why:
        fix = Fix(remark=f"{sides[0].measuring}   (of A, to run where B was measured)")
        raise ConfigError(Problem("A B", names, why, fix, "other_work"))
    notes = [f"{format_number(len(a & b), 'run')} of both sides are not compared"] if a & b else []
    for side, each in zip(sides, rows, strict=True):
        if rest := len(each) - len(shared):
            notes.append(f"{format_number(rest, 'configuration')} only in {side.name}")
    is_packed = "data.packing" in keys  # a packed row holds several samples
    measure = TOKEN_SPEED if is_packed else SAMPLE_SPEED
    variants = [(rows[0][key], rows[1][key]) for key in shared]
    if len(variants) == 1:  # alone it has no other name than its overrides
        one, other = variants[0]
        words, folder = other.label.split(" "), other.entries[0].folder
        kept = [w for w in words if affects(w.partition("=")[0], ()) is not Affects.none]
        label = sides[1].name if folder and other.label == folder.name else " ".join(kept or words)
        variants = [(one, replace(other, label=label))]
    pairs, mean = _tested(variants, measure, notes)
    full = [pair for pair in pairs if pair.speed]
    in_turns = all(_alternates(*pair.runs) for pair in full)
    if full and not in_turns:
        ends = [median(_end(e) for pair in full for e in pair.runs[n]) for n in (0, 1)]
        apart = format_seconds(abs(ends[1] - ends[0]))
        notes += [f"measured {apart} apart: the interval excludes differences of the occasion"]
    limit = tolerance if tolerance is not None else TURNS if in_turns else APART
    return TwoSides(
        sides, keys, _differing_facts(sides), pairs, mean, measure, limit, in_turns, notes
    )


def _described(entries: Sequence[Entry]) -> list[tuple[dict[str, str], Variant]]:
    """Return each configuration with a record, with its settings, hardware and data."""
    variants, machines, _ = group(entries)
    facts = {m.letter: {key: m.facts.get(key, ABSENT) for key in HARDWARE} for m in machines}
    groups = {f"{g}.{k}": value for g, keys in FORMER_GROUPS.items() for k, value in keys.items()}
    groups |= {group: keys.get("option", "none") for group, keys in FORMER_GROUPS.items()}
    former = {key: format_value(value) for key, value in {**FORMER_VALUES, **groups}.items()}
    found = []
    for each in variants:
        if each.first and each.first.record:
            data = {CONTENT: str(each.first.record.plan.get("data_fingerprint", ABSENT))}
            own = {k: v for k, v in each.settings.items() if former.get(k) != v}
            found.append((own | facts[each.machine] | data, each))
    return found


def _matched(
    found: Sequence[Sequence[tuple[dict[str, str], Variant]]],
) -> tuple[dict[str, tuple[str, str]], list[dict[str, Variant]]]:
    """Return the keys in which all of A differ from all of B, and rows by their other settings."""
    fixed = {}
    for key in dict.fromkeys(key for side in found for own, _ in side for key in own):
        one, other = ({own.get(key, ABSENT) for own, _ in side} for side in found)
        if len(one) == len(other) == 1 and one != other:
            fixed[key] = (one.pop(), other.pop())
    parts = [{key: values[n] for key, values in fixed.items()} for n in (0, 1)]
    keys = {key: fixed[key] for key in RunSettings(parts, [(), ()]).differing()}
    rows = [
        {canonical({k: own[k] for k in own if k not in fixed}): each for own, each in side}
        for side in found
    ]
    return keys, rows


def _differing_facts(sides: Sequence[Side]) -> dict[str, tuple[str, str]]:
    facts = [[_facts(e.record) for e in side.entries if e.record] for side in sides]
    names = dict.fromkeys(name for side in facts for each in side for name in each)
    a, b = ({k: AND.join({f.get(k, "none"): 0 for f in side}) for k in names} for side in facts)
    return {k: (a[k], b[k]) for k in names if a[k] != b[k]}


def _tested(
    variants: Sequence[tuple[Variant, Variant]], measure: Measure, notes: list[str]
) -> tuple[list[_Pair], Ratio | None]:
    """Return the rows, with speeds from three repeats of each side on, and the mean speed.

    Excluded runs are added to `notes`.
    """
    key, level, pairs = measure.key, statistics.ALPHA / len(variants), []
    for a, b in variants:
        good = [[e for e in v.entries if e.outcome == Outcome.ok.name] for v in (a, b)]
        runs = [sorted((e for e in each if key in e.measures), key=_end) for each in good]
        pairs.append(_Pair((a, b), runs, compare_losses(a, [b], level=level)[b]))
    samples: dict[tuple[int, int], statistics.Sample] = {
        (n, side): {(side, number): e.measures[key] for number, e in enumerate(runs)}
        for n, pair in enumerate(pairs) for side, runs in enumerate(pair.runs)
    }  # fmt: skip
    for (n, side), (_, number) in statistics.find_outliers(samples).items():
        run = pairs[n].runs[side].pop(number)
        why = "whose other repeats are faster and agree"
        notes.append(f"excluded from the tests: {run.folder and run.folder.name}, {why}")
    full = [n for n, pair in enumerate(pairs) if min(map(len, pair.runs)) >= MIN_REPEATS]
    speeds = [[[e.measures[key] for e in pairs[n].runs[side]] for n in full] for side in (0, 1)]
    ratios = statistics.correct(differences(*speeds)) if full else {}
    for place, n in enumerate(full):
        pairs[n] = replace(pairs[n], speed=ratios[place])
    return pairs, ratios.get(MEAN)


def _alternates(a: Sequence[Entry], b: Sequence[Entry]) -> bool:
    """Return whether the runs alternate about as often as there are rounds (A B B A: twice)."""
    order = sorted([*((_end(each), "A") for each in a), *((_end(each), "B") for each in b)])
    changes = sum(one != other for (_, one), (_, other) in pairwise(order))
    return changes >= max(2, min(len(a), len(b)) - 1)
