"""Rounds of `sweep.repeats=auto`: which runs are next, what is decided, and what is still open."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import fmean

from eke.common.errors import Fix, Problem
from eke.common.files import read_json
from eke.common.text import format_number, format_seconds
from eke.config.compose import Composed
from eke.config.schema import Sweep
from eke.config.schema.codec import make_converter
from eke.config.schema.fields import Affects
from eke.config.schema.resources import Seeds
from eke.estimate.time import StepTime, Unknown, sum_line
from eke.launch.processes.sweep import Cell, Job, SweepFile
from eke.plan.record import EXIT_RESUMABLE, Outcome
from eke.results.report.compare.comparison import find_families
from eke.results.report.compare.keys import affects
from eke.results.report.compare.load_records import ABSENT, NOT_RUN, Entry, Settings, settings_of
from eke.results.report.compare.measures import num_devices
from eke.results.report.compare.statistics import MIN_REPEATS
from eke.results.report.compare.until_decided import Decision, Rule, State, decide, decision_of
from eke.workflows import print_once

EXPECTED = 5
"""Repeats that `plan_only=true` expects: the mean of twelve configurations with differences of 0 to
30 % at 2 % noise (benchmarks/report_power_auto.py)."""

Key = tuple[str, ...]
"""A configuration: its overrides without seed and repeat."""


def key_of(overrides: Sequence[str]) -> Key:
    """Return the configuration of a run."""
    return tuple(text for text in overrides if not text.startswith(("repeat=", "seed=")))


def is_about_loss(runs: Sequence[Composed]) -> bool:
    """Return whether keys of class *learning* differ, and none that may change the speed."""
    plain = [make_converter().unstructure(each.config) for each in runs]
    found = [settings_of(c, each.choices) for c, each in zip(plain, runs, strict=True)]
    keys = Settings(found, [each.overrides for each in runs]).differing()
    classes = {affects(key, {each.get(key, ABSENT) for each in found}) for key in keys}
    return classes - {Affects.none, Affects.group} == {Affects.learning}


def find_problems(runs: Sequence[Composed], settings: Sweep) -> list[Problem]:
    """Return why the results of these runs, a first round, cannot decide their repeats."""
    problems = []
    if not settings.is_auto:
        return problems
    fixed = Fix(f"sweep.repeats={MIN_REPEATS}")
    if len({key_of(each.overrides) for each in runs}) < 2:
        why = "there is one configuration, and nothing to compare it with"
        return [Problem("sweep.repeats", settings.repeats, why, fixed)]
    if is_about_loss(runs):
        if settings.seeds is Seeds.same:
            why = "only the loss can differ here, and repeats with one seed have one loss"
            fix = Fix("sweep.seeds=per_repeat")
            problems.append(Problem("sweep.seeds", settings.seeds.name, why, fix))
        return problems
    for key in ("cpu_slots", "runs_per_device"):
        if (value := getattr(runs[0].config.launcher, key)) > 1:
            why = "runs that share a device have no speed to compare"
            problems.append(Problem(f"launcher.{key}", str(value), why, Fix(f"launcher.{key}=1")))
    return problems


def planned_lines(settings: Sweep, times: Sequence[StepTime | Unknown], kind: str) -> list[str]:
    """Return runs and device-hours: least, expected and most; `times` are those of one round."""
    most, known = settings.max_repeats, [each for each in times if isinstance(each, StepTime)]
    lines = []
    for name, n in (("least", MIN_REPEATS), ("expected", min(EXPECTED, most)), ("most", most)):
        hours = f"; {sum_line(known * n, kind).splitlines()[0]}" if known else ""
        lines.append(f"{name}: {n} repeats, {format_number(n * len(times), 'run')}{hours}")
    return lines


class Rounds:
    """Runs of a sweep, one round after another; `file` gets those of the rounds that begin."""

    def __init__(
        self,
        file: SweepFile,
        cells: Sequence[Cell],
        jobs: Sequence[Job],
        settings: Sweep,
    ) -> None:
        self._file, self._cells, self._settings = file, cells, settings
        self._rule = Rule(settings.max_repeats, settings.resolve)
        # Equal configurations are one, and which of them is its first may differ by round.
        self._keys = {job: min(key_of(cells[n].overrides) for n in job.cells) for job in jobs}
        self.jobs: list[Job] = []
        """Runs of the rounds so far, in order."""
        self.is_over = False
        """Whether there is no further round."""
        self._rows: dict[Key, Decision] = {}
        self._baselines: dict[Key, Key] = {}
        """Configuration -> the one with which it is compared."""
        self._stopped: dict[Key, int] = {}
        """Configuration -> number of rounds after which it stopped."""
        self._names: dict[Key, str] = {}
        self._looked, self._ended_by = 0, ""
        self._read()

    def _read(self) -> None:
        """Take over what an earlier command decided; an unreadable file holds no decision."""
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            before = read_json(self._file.paths.sweep)["repeats"]
            most, looked = int(before["max_repeats"]), int(before["rounds"])
            for row in before["rows"]:
                key, each = tuple(row["overrides"]), decision_of(row)
                if each.state is State.futile and most < self._rule.max_repeats:
                    each = replace(each, state=State.open)
                if each.state is State.failed:  # it is tried again
                    continue
                self._rows[key], self._baselines[key] = each, tuple(row["baseline"])
                self._names[key] = str(row["name"])
                if each.stops:
                    self._stopped[key] = int(row["stopped"])
            self._looked = looked
            if most != self._rule.max_repeats:
                was, now = (f"{100 * Rule(n).level:.2g} %" for n in (most, self._rule.max_repeats))
                print_once(
                    f"  sweep.max_repeats was {most}: further looks are at {now} instead of {was}; "
                    "decisions stay"
                )

    def __iter__(self) -> Iterator[list[Job]]:
        for number in range(self._settings.max_repeats):
            jobs = [job for job in self._keys if job.plan.config.repeat == number]
            jobs = [job for job in jobs if self._is_due(self._keys[job], number)]
            others = {self._keys[job] for job in jobs} - {*self._baselines.values()}
            if number and (not others or self._costs_too_much(jobs)):
                break
            if number:
                self._begin(jobs)
            self.jobs += jobs
            yield jobs
            self._look(jobs, number + 1)
        self.is_over = True

    def _is_due(self, key: Key, number: int) -> bool:
        """Whether a configuration runs in this round; a baseline does while a row of it does."""
        rows = [row for row, base in self._baselines.items() if base == key != row]
        if rows and not any(self._is_due(row, number) for row in rows):
            return False
        if number >= self._stopped.get(self._baselines.get(key, key), number + 1):
            return False
        return number < self._stopped.get(key, number + 1)

    def _begin(self, jobs: Sequence[Job]) -> None:
        """Append the cells of a round after the first to the file."""
        for job in jobs:
            numbers = [len(self._file.cells) + place for place in range(len(job.cells))]
            self._file.cells += [self._cells[n] for n in job.cells]
            job.number, job.cells = numbers[0], numbers

    def _look(self, jobs: Sequence[Job], rounds: int) -> None:
        """Stop what failed, and decide what can be decided after so many rounds."""
        anew = {self._keys[job] for job in jobs if not job.reused}
        if rounds <= self._looked and anew:  # these decisions were about other runs
            gone = [k for k in self._rows if anew & {k, self._baselines.get(k)}]
            for key in gone:
                self._rows.pop(key), self._stopped.pop(key, None)
        for job in jobs:
            if job.outcome is not Outcome.ok:
                self._rows[self._keys[job]] = Decision(State.failed)
                self._stopped[self._keys[job]] = rounds
        if rounds >= MIN_REPEATS and (rounds > self._looked or anew):
            self._decide(rounds)
        self._looked = max(self._looked, rounds)
        self._write()

    def _decide(self, rounds: int) -> None:
        """Look at all configurations as the report does: by machine, each with its baseline."""
        keys = {self._entry(job): self._keys[job] for job in self.jobs}
        for family in find_families([*keys]):
            own = {v: min(keys[each] for each in v.entries) for v in family.members}
            base = own[family.baseline]
            alone = len(own) < 2 and base not in self._baselines  # nothing to compare it with
            self._stopped |= {base: self._stopped.get(base, rounds)} if alone else {}
            self._names |= {key: v.label for v, key in own.items()}
            measure = next((m for m in family.measures if family.baseline.sample(m)), "")
            samples = {key: v.sample(measure) for v, key in own.items()}
            for key, each in decide(samples, base, self._rule, self._rows).items():
                if self._rows.get(key, each).repeats > each.repeats:  # on another machine
                    continue
                self._rows[key], self._baselines[key] = each, base
                if each.stops:
                    self._stopped.setdefault(key, rounds)

    def _entry(self, job: Job) -> Entry:
        cell = self._file.cells[job.number]
        rows, outcome = (cell.row,) if cell.row else (), job.outcome
        return Entry(cell.overrides, outcome.name if outcome else NOT_RUN, "", rows, "", job.record)

    def _write(self) -> None:
        rows = [
            {
                "name": self._names.get(key, " ".join(key)), "overrides": key,
                "baseline": self._baselines.get(key, ()), "stopped": self._stopped.get(key),
                **each.plain(),
            }
            for key, each in self._rows.items()
        ]  # fmt: skip
        rule = {"rule": "auto", **vars(self._rule), "level": self._rule.level}
        self._file.note_rounds({**rule, "rounds": self._looked, "rows": rows})

    def _costs_too_much(self, jobs: Sequence[Job]) -> bool:
        """Whether this round would exceed `sweep.budget`, if its runs last as those before."""
        budget = self._settings.budget
        if budget is None or not self.jobs:
            return False
        spent = sum(_hours(job) for job in self.jobs)
        if spent + len(jobs) * spent / len(self.jobs) <= budget:
            return False
        self._ended_by = f"sweep.budget={budget:g}"
        return True

    def show_outcome(self, code: int) -> int:
        """Print what is decided and open; returns the sweep's exit code, `code` if it is over."""
        print_once("\n".join(f"  {line}" for line in self._closing()))
        return code if self.is_over else EXIT_RESUMABLE

    def _closing(self) -> list[str]:
        """Return what is decided, what it cost, and what is open; without rows, no line."""
        rows = {k: each for k, each in self._rows.items() if k not in self._baselines.values()}
        number = len({*self._keys.values()})
        if not rows:
            return []
        seconds = [_seconds(job) for job in self.jobs]
        runs, most = len(self.jobs), self._settings.max_repeats
        decided = sum(each.state.is_decided for each in rows.values())
        all_s = format_seconds(sum(seconds) / runs * most * number)
        lines = [
            f"{decided} of {len(rows)} decided after {runs / number:.1f} repeats on average ("
            f"{format_number(runs, 'run')}, {format_seconds(sum(seconds))}; {most} repeats of all: "
            f"{most * number} runs, about {all_s})."
        ]
        left = [self._open(k, each) for k, each in rows.items() if not each.state.is_decided]
        if left:
            lines.append(f"Open: {'; '.join(left)}.")
        if self._ended_by:
            lines.append(f"Ended by {self._ended_by}: with a larger one the same command goes on.")
        return lines

    def _open(self, key: Key, row: Decision) -> str:
        """One open configuration with its interval, and what would decide it."""
        text = self._names.get(key, " ".join(key))
        if row.state is State.failed:
            return f"{text}: failed"
        if row.value is None or row.low is None or row.high is None:
            return f"{text}: too few repeats"
        ends = f"{100 * (row.low - 1):+.1f} to {100 * (row.high - 1):+.1f} %"
        text = f"{text} {100 * (row.value - 1):+.1f} % ({ends})"
        most = 2 * self._settings.max_repeats
        if row.forecast is None or row.forecast > most:
            return f"{text}: more than {most} repeats"
        more = row.forecast - row.repeats
        pair = {key, self._baselines[key]}
        each_s = [_seconds(job) for job in self.jobs if self._keys[job] in pair]
        about = format_seconds(2 * more * fmean(each_s))
        return f"{text}: about {format_number(more, 'more repeat')}, {about}"


def _seconds(job: Job) -> float:
    """Seconds of a run by its record."""
    times = job.record.timing if job.record else None
    parts = (times.startup_s, times.train_s, times.eval_s, times.checkpoint_s) if times else ()
    return sum(each or 0.0 for each in parts)


def _hours(job: Job) -> float:
    """Device-hours of a run."""
    return _seconds(job) * (num_devices(job.record) if job.record else 1) / 3600
