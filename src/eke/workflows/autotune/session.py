"""A search under way: which candidate, its trial, and what it says."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from eke.common.errors import EkeError
from eke.common.paths import SweepPaths
from eke.config.compose import Arguments, compose, launcher_of
from eke.config.sweep import SweepCell
from eke.estimate.memory import is_open, stop_tracing, traced_forecast
from eke.launch import Books, Cell, Job, Pool, SweepFile, forking, open_board, start_run, watching
from eke.launch.fork import ForkServer
from eke.launch.slurm import Cluster, place_in_cluster
from eke.plan.planner import Plan
from eke.plan.record import EXIT_RESUMABLE
from eke.tuning.search import (
    Candidates,
    Fit,
    Measured,
    Numerics,
    Objective,
    Search,
    Trial,
    all_diverge,
    describe_trial,
    fit_of,
    is_higher,
    measured,
    room_of,
    short_name,
    trial_overrides,
)
from eke.workflows.console import say
from eke.workflows.sweep import devices_of, make_jobs, plan_cells

IN_QUEUE = 3
"""Trials on GPUs that are submitted to a cluster at a time: each wave waits in the queue once.
Those on CPUs would share a node's memory bandwidth, and slow each other down."""


@dataclass(frozen=True)
class Wish:
    """What `eke fit` was asked for."""

    command: tuple[str, ...]
    """What was typed behind `eke fit`."""
    arguments: Arguments
    objective: Objective
    numerics: Numerics
    budget: int
    name: str = ""
    """Of the option that is written; empty: `fit_`, the model, and how the search is unusual."""


@dataclass
class Fitting:
    """A search under way: its candidates, and its trials as the cells of a sweep."""

    wish: Wish
    typed: tuple[str, ...]
    candidates: Candidates
    search: Search
    baseline: Plan
    paths: SweepPaths
    option: str
    """Name under which the best is written."""
    cells: list[Cell] = field(default_factory=list)
    trials: list[Measured] = field(default_factory=list)
    server: ForkServer | None = None
    """Forks the trials on this machine, where that was asked for."""

    @property
    def in_cluster(self) -> bool:
        """Whether trials run on nodes of a cluster."""
        return launcher_of(self.wish.arguments.overrides) == "slurm"

    def run(self) -> Fit:
        """Try candidates until nothing better is expected, then the best once more.

        Raises:
            KeyboardInterrupt: a signal asked to stop; the same command goes on.
        """
        at_once = IN_QUEUE if self.in_cluster and self.baseline.device.kind == "cuda" else 1
        with watching(self.paths), self._warm():
            while chosen := self.worth_trying(at_once):
                self.try_out(chosen)
            while again := self.search.to_confirm():
                self.try_out(again)
        return fit_of(self.search, self.candidates, self.trials, self.wish.numerics)

    @contextmanager
    def _warm(self) -> Iterator[None]:
        """With `launcher.fork_server=true`, one server forks all trials: it imports only once."""
        launcher = self.baseline.config.launcher
        if not launcher.fork_server:
            yield
            return
        plans = [candidate.plan for candidate in self.candidates.found]
        devices = devices_of({self.baseline.device.kind}, launcher)
        with forking(plans, devices, self.paths.fork_server, say) as self.server:
            yield

    def worth_trying(self, count: int) -> list[int]:
        """Numbers of candidates, each of which has been looked at closely."""
        if all_diverge(self.trials, self.candidates.first, self.wish.numerics):
            return []
        while chosen := self.search.next(count):
            unsure = [n for n in chosen if is_open(self.candidates.found[n].forecast)]
            if not [n for n in unsure if self.look_closely(n)]:
                return chosen
        return []

    def look_closely(self, number: int) -> bool:
        """Trace a candidate's memory; returns whether it then counts otherwise than before."""
        found = self.candidates.found[number]
        forecast = traced_forecast(found.plan)
        room = room_of(forecast)
        point = replace(found.point, room=room, peak_bytes=forecast.best.expected)
        self.candidates.found[number] = replace(found, point=point, forecast=forecast)
        self.search.narrow(number, room, forecast.best.expected)
        return room is not found.point.room

    def try_out(self, numbers: Sequence[int]) -> None:
        """Run trials of candidates, and tell the search what they found."""
        repeats = {n: sum(each.number == n for each in self.trials) for n in numbers}
        labels = [f"trial {len(self.trials) + at}" for at, _ in enumerate(numbers, start=1)]
        for label, n in zip(labels, numbers, strict=True):
            again = ", once more" if repeats[n] else ""
            say(f"{label} of at most {self.wish.budget}: {self.name(n)}{again}")
        stop_tracing()  # on a CPU its memory is the trials'
        new = [self._cell(n, repeats[n]) for n in numbers]
        first = len(self.cells)
        cells, plans = plan_cells(new, f"fit-{self.paths.folder.name}", _silent, self.in_cluster)
        self.cells += cells
        jobs = make_jobs(labels, plans, {})
        for job in jobs:
            job.cells = [first + job.number]
        self._run(jobs)
        by_number = {job.number: job for job in jobs}
        for at, n in enumerate(numbers):
            self._note(self._measured(n, repeats[n], cells[at], by_number.get(at)))

    def name(self, number: int) -> str:
        """What sets a candidate apart from what was typed."""
        if number == self.candidates.first:
            return "as typed"
        return short_name(self.candidates.found[number], self.baseline)

    def _cell(self, number: int, repeat: int) -> SweepCell:
        candidate = self.candidates.found[number]
        overrides = trial_overrides(self.typed, candidate.overrides, repeat)
        composed = compose(overrides, self.wish.arguments.config_dir, in_sweep=True)
        return SweepCell(composed, self.name(number))

    def _run(self, jobs: list[Job]) -> None:
        command = ("fit", *self.wish.command)
        file = SweepFile(self.paths, command, self.cells, "fit")
        heard: list[int] = []
        with open_board(len(jobs)) as board:
            if self.in_cluster:
                cluster = Cluster(
                    Books(jobs, board, file, place_in_cluster), self.paths, self.paths.folder.name
                )
                cluster.submit()
                self._refuse_if_none_is_taken(cluster)
                cluster.watch()
            else:
                devices = devices_of({job.kind for job in jobs}, self.baseline.config.launcher)
                books = Books(jobs, board, file)
                pool = Pool(books, devices)
                if self.server is not None:
                    start = partial(start_run, server=self.server)
                    pool = Pool(books, devices, start, self.server.is_ready)
                pool.run()
                heard = pool.heard
        # Who asks to stop means the search, also where this trial has come to its own end.
        cut_short = [j for j in jobs if j.outcome is None or j.outcome.exit_code == EXIT_RESUMABLE]
        if heard or cut_short:
            raise KeyboardInterrupt

    def _refuse_if_none_is_taken(self, cluster: Cluster) -> None:
        """What a cluster will not take of the first trials, it will not take of the next.

        Raises:
            EkeError: sbatch took none, and nothing was measured so far.
        """
        measured_some = any(each.trial.step_s for each in self.trials)
        refused = list(cluster.refused.values())
        if refused and len(refused) == len(cluster.books.jobs) and not measured_some:
            raise EkeError(f"no trial was submitted: {refused[0]}")

    def _measured(self, number: int, repeat: int, cell: Cell, job: Job | None) -> Measured:
        if job is None or job.record is None:
            reason = cell.reason or (job.reason if job else "") or "it has no record"
            return Measured(number, repeat, Trial(None), cell.outcome or "refused", reason)
        found = measured(
            number, repeat, job.record, job.folder, self.baseline.steps.total,
            self.baseline.device.kind == "cuda",
            self.candidates.found[number].forecast.components.get("context", 0),
        )  # fmt: skip
        typed = next((t.loss for t in self.trials if t.number == self.candidates.first), None)
        if self.wish.numerics is Numerics.same and is_higher(found.loss, typed):
            reason = f"its loss is higher: {found.loss:.4f} and not {typed:.4f}"
            found = replace(found, trial=replace(found.trial, step_s=None), reason=reason)
        return found

    def _note(self, found: Measured) -> None:
        self.trials.append(found)
        self.search.tell(found.number, found.trial)
        say(f"  {describe_trial(found, self.candidates.found[found.number])}")


def _silent(done: int, total: int) -> None:
    """A few cells are planned at once."""
