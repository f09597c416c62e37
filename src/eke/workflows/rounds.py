"""Rounds of `sweep.repeats=auto`: next runs, decisions and open configurations."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import fmean
from typing import Any

from eke.common.errors import Fix, Problem
from eke.common.files import read_json
from eke.common.screen import width, wrap
from eke.common.text import format_number, format_seconds
from eke.config.compose import Composed
from eke.config.schema import Sweep
from eke.config.schema.codec import make_converter
from eke.config.schema.fields import Affects
from eke.config.schema.resources import Seeds
from eke.estimate.time import StepTime, Unknown, sum_line
from eke.launch.processes.sweep import Job, SweepFile, SweepRun
from eke.plan.record import Outcome
from eke.results.report.compare.comparison import find_families
from eke.results.report.compare.load_records import (
    ABSENT,
    NOT_RUN,
    Entry,
    RunKey,
    RunSettings,
    affects,
    key_of,
    settings_of,
)
from eke.results.report.compare.measures import num_devices
from eke.results.report.compare.statistics import MIN_REPEATS
from eke.results.report.compare.until_decided import (
    FUTILE,
    RowDecision,
    State,
    StoppingRule,
    decide,
    decision_of,
)
from eke.workflows import print_once


def is_about_loss(runs: Sequence[Composed]) -> bool:
    """Return whether keys of class *learning* differ, and no key that may change the speed."""
    plain = [make_converter().unstructure(each.config) for each in runs]
    found = [settings_of(c, each.choices) for c, each in zip(plain, runs, strict=True)]
    keys = RunSettings(found, [each.overrides for each in runs]).differing()
    classes = {affects(key, {each.get(key, ABSENT) for each in found}) for key in keys}
    return classes - {Affects.none, Affects.group} == {Affects.learning}


def find_repeat_problems(runs: Sequence[Composed], settings: Sweep) -> list[Problem]:
    """Return the reasons that results of these runs, a first round, cannot decide the repeats."""
    if not settings.is_auto:
        return []
    if len({key_of(each.overrides) for each in runs}) < 2:
        why = "compares configurations, and this sweep has one"
        fix = Fix(f"sweep.repeats={MIN_REPEATS}")
        return [Problem("sweep.repeats", settings.repeats, why, fix, "no_comparison")]
    if is_about_loss(runs):
        why = "only the loss can differ, and repeats with one seed have one loss"
        problem = Problem(
            "sweep.seeds", "same", why, Fix("sweep.seeds=per_repeat"), "no_comparison"
        )
        return [problem] if settings.seeds is Seeds.same else []
    why, launcher = "runs that share a device have no comparable speed", runs[0].config.launcher
    several = {key: getattr(launcher, key) for key in ("cpu_slots", "runs_per_device")}
    return [
        Problem(f"launcher.{key}", str(number), why, Fix(f"launcher.{key}=1"), "no_comparison")
        for key, number in several.items() if number > 1
    ]  # fmt: skip


def planned_repeats(settings: Sweep) -> dict[str, int]:
    """Return the smallest, expected and largest number of repeats, {} if it is fixed."""
    if not settings.is_auto:
        return {}
    # 5 is the mean of twelve configurations with differences of 0 to 30 % at 2 % noise
    # (benchmarks/report_power_auto.py).
    most = settings.max_repeats
    return {"least": MIN_REPEATS, "expected": min(5, most), "most": most}


def planned_lines(settings: Sweep, times: Sequence[StepTime | Unknown], kind: str) -> list[str]:
    """Return the runs and device-hours of `planned_repeats` from the step times of one round."""
    known, lines = [each for each in times if isinstance(each, StepTime)], []
    for name, n in planned_repeats(settings).items():
        hours = f"; {sum_line(known * n, kind).partition(' for ')[0]}" if known else ""
        lines.append(f"{name}: {n} repeats, {format_number(n * len(times), 'run')}{hours}")
    return lines


class Rounds:
    """Runs of a sweep, one round after another. Each round that starts is added to `file`."""

    def __init__(
        self, file: SweepFile, cells: Sequence[SweepRun], jobs: Sequence[Job], settings: Sweep
    ) -> None:
        self._file, self._cells, self._settings = file, cells, settings
        self._rule = StoppingRule(settings.max_repeats, settings.resolve)
        # Equal configurations share a key. The first of them may differ between rounds.
        self._keys = {job: min(key_of(cells[n].overrides) for n in job.cells) for job in jobs}
        self.jobs: list[Job] = []
        """Runs of the rounds so far, in order."""
        self.is_over = False
        """True if there is no further round."""
        self._rows: dict[RunKey, RowDecision] = {}
        """Decisions about configurations other than baselines."""
        self._looked, self._ended_by = 0, list[str]()
        # The file may be missing or damaged.
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            self._read(read_json(file.paths.sweep)["repeats"])

    def _read(self, before: Mapping[str, Any]) -> None:
        """Restore the decisions of an earlier command."""
        rows = dict(map(decision_of, before["rows"]))
        most, self._looked = int(before["max_repeats"]), int(before["rounds"])
        if most < self._rule.max_repeats:
            again = [key for key, row in rows.items() if row.state is State.futile]
            rows |= {k: replace(rows[k], state=State.open, stopped=None) for k in again}
        self._rows = rows
        if most != self._rule.max_repeats:
            was, now = (f"{100 * rule.level:.2g} %" for rule in (StoppingRule(most), self._rule))
            text = f"further tests have the level {now} instead of {was}. Decisions are kept"
            print_once(f"  sweep.max_repeats was {most}: {text}")

    def __iter__(self) -> Iterator[list[Job]]:
        for number in range(self._settings.max_repeats):
            jobs = [job for job in self._keys if job.plan.config.repeat == number]
            jobs = [job for job in jobs if self._is_due(self._keys[job], number)]
            if number:  # the first round is whole
                baselines = {row.baseline for row in self._rows.values()}
                others = {self._keys[job] for job in jobs} - baselines
                if not others or self._costs_too_much(jobs):
                    break
                for job in jobs:
                    first = len(self._file.cells)
                    self._file.cells = [*self._file.cells, *(self._cells[n] for n in job.cells)]
                    job.number, job.cells = first, list(range(first, len(self._file.cells)))
            self.jobs += jobs
            yield jobs
            self._look(jobs, number + 1)
        self.is_over = True

    def _is_due(self, key: RunKey, number: int) -> bool:
        """Return whether a configuration, or for a baseline one of its rows, runs in this round."""
        row = self._rows.get(key)
        base = self._rows.get(row.baseline) if row else None
        if any(each.stopped <= number for each in (row, base) if each and each.stopped):
            return False
        rows = [each for each, other in self._rows.items() if other.baseline == key]
        return not rows or any(self._is_due(each, number) for each in rows)

    def _look(self, jobs: Sequence[Job], rounds: int) -> None:
        """Stop failed configurations, and decide others after this number of rounds."""
        anew = {self._keys[job] for job in jobs if not job.reused}
        if rounds <= self._looked:  # remove decisions about replaced runs
            for key in [k for k, row in self._rows.items() if anew & {k, row.baseline}]:
                del self._rows[key]
        for job in jobs:
            if job.outcome is not Outcome.ok:
                failed = RowDecision(State.failed, name=_name(job), stopped=rounds)
                self._rows[self._keys[job]] = failed
        if rounds >= MIN_REPEATS and (rounds > self._looked or anew):
            self._decide(rounds)
        self._looked = max(self._looked, rounds)
        rule = {"rule": "auto", **vars(self._rule), "level": self._rule.level}
        rows = [row.plain(key) for key, row in self._rows.items()]
        self._file.note_rounds({**rule, "rounds": self._looked, "rows": rows})

    def _decide(self, rounds: int) -> None:
        """Test all configurations in families with one baseline each, as the report does."""
        keys: dict[Entry, RunKey] = {}
        for job in self.jobs:
            cell, how = self._file.cells[job.number], job.outcome.name if job.outcome else NOT_RUN
            rows = (cell.row,) if cell.row else ()
            keys[Entry(cell.overrides, how, "", rows, "", job.record)] = self._keys[job]
        stopped = {key: row for key, row in self._rows.items() if row.stopped is not None}
        self._rows = {self._keys[job]: RowDecision(name=_name(job)) for job in self.jobs} | stopped
        families = find_families([*keys])
        # A cluster may have several kinds of nodes. Use the kind with most runs.
        kinds = Counter(v.machine for part in families for v in part.members for _ in v.records)
        main = kinds.most_common(1)[0][0] if kinds else ""
        for part in families:
            if (first := part.baseline) is None or first.machine != main:
                continue
            own = {v: min(keys[each] for each in v.entries) for v in part.members if v.records}
            base = own[first]
            measure = next((key for key in part.measures if first.sample(key)), "")
            samples = {key: v.sample(measure) for v, key in own.items()}
            found = decide(samples, base, self._rule, stopped)
            if not found:  # a group of one is not compared
                found = {base: RowDecision(State.failed)}
            elif base not in stopped:
                del self._rows[base]
            for variant, key in own.items():
                if key in found and key not in stopped:
                    name = f"{variant.label}{f' of {variant.work}' if variant.work else ''}"
                    over = None if found[key].state is State.open else rounds
                    self._rows[key] = replace(found[key], name=name, baseline=base, stopped=over)

    def _costs_too_much(self, jobs: Sequence[Job]) -> bool:
        """Return whether this round would exceed `sweep.budget` at the mean time of a run."""
        budget, spent = self._settings.budget, sum(_seconds(job, True) for job in self.jobs) / 3600
        if budget is None or spent * (1 + len(jobs) / len(self.jobs)) <= budget:
            return False
        self._ended_by = [f"sweep.budget={budget:g} is too small for another round"]
        return True

    def outcome_lines(self) -> list[str]:
        """Return decisions and open configurations."""
        baselines = {row.baseline for row in self._rows.values()}
        rows = {key: row for key, row in self._rows.items() if key not in baselines}
        if not rows:
            return []
        decided = sum(row.state.is_decided for row in rows.values())
        number, runs, most = len({*self._keys.values()}), len(self.jobs), self._rule.max_repeats
        took = sum(map(_seconds, self.jobs))
        text = (
            f"{decided} of {len(rows)} decided after {runs / number:.1f} repeats on average "
            f"({format_number(runs, 'run')}, {format_seconds(took)}; {most} repeats of all: "
            f"{most * number} runs, about {format_seconds(took / runs * most * number)})."
        )
        left = [self._open(k, r) for k, r in rows.items() if r.state in (State.open, State.futile)]
        failed = [row.name for row in rows.values() if row.state is State.failed]
        parts = (("Open", left), ("Failed", failed), ("Ended", self._ended_by))
        texts = [text, *(f"{name}: {'; '.join(found)}." for name, found in parts if found)]
        return [line for text in texts for line in wrap(text, width(), "  ", "  ")]

    def _open(self, key: RunKey, row: RowDecision) -> str:
        """Return an open configuration with its interval, and the repeats that would decide it."""
        if row.value is None or row.low is None or row.high is None:
            return f"{row.name}: too few measured repeats"
        value, low, high = (100 * (each - 1) for each in (row.value, row.low, row.high))
        text = f"{row.name} {value:+.1f} % ({low:+.1f} to {high:+.1f} %)"
        most = round(FUTILE * self._rule.max_repeats)
        if row.forecast is None or row.forecast > most:
            return f"{text}: more than {most} repeats"
        more = row.forecast - row.repeats
        each_s = [_seconds(j) for j in self.jobs if self._keys[j] in (key, row.baseline)]
        about = format_seconds(2 * more * fmean(each_s))
        return f"{text}: about {format_number(more, 'more repeat')}, {about}"


def _name(job: Job) -> str:
    """Return the overrides of a run that differ in its sweep, without seed and repeat."""
    return " ".join(key_of(job.label.split()))


def _seconds(job: Job, of_devices: bool = False) -> float:
    """Return the seconds of a run by its record, or the sum over its devices."""
    whole = job.record.timing.whole_s if job.record else 0.0
    return whole * num_devices(job.record) if of_devices and job.record else whole
