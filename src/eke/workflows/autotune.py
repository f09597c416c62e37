"""Search for the fastest configuration (`eke fit`): setup, trials and result."""

import json
import operator
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

from eke.common.errors import ConfigError, EkeError, Fix, Problem
from eke.common.files import write_atomic, write_json
from eke.common.paths import SweepPaths, conf_folder, program, short_path
from eke.common.screen import table_width, width, wrap
from eke.common.text import format_number
from eke.config.compose import Arguments, Composed, compose, launcher_of
from eke.config.sweep import SweepCell
from eke.estimate.memory import needs_trace, stop_tracing, traced_forecast
from eke.estimate.time import StepTime, forecast_time, steps_to_pay
from eke.launch.interface import Launcher, find_launcher
from eke.launch.processes.follow import watching
from eke.launch.processes.progress_table import open_board
from eke.launch.processes.sweep import Job, SweepFile, SweepRun, sweep_id, sweep_paths
from eke.launch.processes.sweep_scheduler import SweepState
from eke.plan.planner import Plan
from eke.plan.record import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, Outcome
from eke.results.report.summary import PlanningLine
from eke.rules.techniques import Numerics, group_of
from eke.tuning.recipes import RECIPES
from eke.tuning.search.candidates import (
    Candidates,
    axes_for,
    cut_overrides,
    enumerate_candidates,
    search_verdict,
    with_explicit_values,
)
from eke.tuning.search.render_result import (
    describe_candidates,
    describe_fit,
    describe_trial,
    likely,
    short_name,
)
from eke.tuning.search.result import Fit, all_diverge, free_path, write_experiment
from eke.tuning.search.search import (
    Measured,
    Search,
    drop_overrides,
    is_higher,
    measured,
    trial_overrides,
)
from eke.tuning.search.search_space import Objective, Trial
from eke.workflows import print_once, print_progress, report_failure
from eke.workflows.auto_batch import chosen_overrides
from eke.workflows.planning import plan_for
from eke.workflows.running import plan_unless_answered
from eke.workflows.sweep import make_jobs, plan_cells


@dataclass(frozen=True)
class TuneRequest:
    """Request of `eke fit`."""

    command: tuple[str, ...]
    arguments: Arguments
    objective: Objective
    numerics: Numerics
    budget: int
    name: str = ""
    """Name of the written option. Empty: `fit_`, the model, and unusual goals of the search."""
    as_json: bool = False


@dataclass
class _Fitting:
    """A search in progress: its candidates, and its trials as jobs of a sweep."""

    request: TuneRequest
    typed: tuple[str, ...]
    candidates: Candidates
    search: Search
    baseline: Plan
    paths: SweepPaths
    launcher: Launcher
    option: str
    """Name of the option with the best configuration."""
    cells: list[SweepRun] = field(default_factory=list)
    trials: list[Measured] = field(default_factory=list)

    def run(self) -> Fit:
        """Try candidates until no better result is expected, then repeat the best."""
        at_once = self.launcher.trials_at_once if self.baseline.device.kind == "cuda" else 1
        with watching(self.paths):
            while chosen := self.next_candidates(at_once):
                self.try_out(chosen)
            while again := self.search.to_confirm():
                self.try_out(again)
        return Fit(self.search, self.candidates, self.trials, self.request.numerics)

    def next_candidates(self, count: int) -> list[int]:
        """Return the numbers of the next candidates, with traced memory if it was unknown."""
        if all_diverge(self.trials, self.candidates.first, self.request.numerics):
            return []
        while chosen := self.search.next(count):
            unsure = [n for n in chosen if needs_trace(self.candidates.found[n].forecast)]
            if not any([self._trace(n) for n in unsure]):  # a list: trace all
                return chosen
        return []

    def _trace(self, number: int) -> bool:
        """Trace a candidate's memory, and return whether its fit has changed."""
        found = self.candidates.found[number]
        forecast = traced_forecast(found.plan)
        verdict = search_verdict(forecast)
        point = replace(found.point, verdict=verdict, peak_bytes=forecast.peak.expected)
        self.candidates.found[number] = replace(found, point=point, forecast=forecast)
        self.search.points[number] = point
        return verdict is not found.point.verdict

    def try_out(self, numbers: Sequence[int]) -> None:
        """Run trials of candidates, and add their results to the search."""
        labels, new, repeats = list[str](), list[SweepCell](), list[int]()
        for n in numbers:
            candidate = self.candidates.found[n]
            name = short_name(candidate, self.baseline)
            repeat = sum(each.number == n for each in self.trials)
            labels.append(f"trial {len(self.trials) + len(labels) + 1}")
            again = ", repeated" if repeat else ""
            print_progress(f"{labels[-1]} of at most {self.request.budget}: {name}{again}")
            overrides = trial_overrides(self.typed, candidate.overrides, repeat)
            composed = compose(overrides, self.request.arguments.config_dir, in_sweep=True)
            new.append(SweepCell(composed, name))
            repeats.append(repeat)
        stop_tracing()  # on a CPU its memory is the trials'
        first = len(self.cells)
        group = f"fit-{self.paths.folder.name}"
        cells, plans = plan_cells(new, group, lambda *_: None, self.launcher)
        self.cells += cells
        jobs = make_jobs(labels, plans, {})
        for job in jobs:
            job.cells = [first + job.number]
        self._run(jobs)
        by_number = {job.number: job for job in jobs}
        for at, n in enumerate(numbers):
            found = self._measured(n, repeats[at], cells[at], by_number.get(at))
            self.trials.append(found)
            self.search.tell(found.number, found.trial)
            print_progress(f"  {describe_trial(found, self.candidates.found[found.number])}")

    def _run(self, jobs: list[Job]) -> None:
        command = ("fit", *self.request.command)
        file = SweepFile(self.paths, command, self.cells, "fit")
        with open_board(file) as board:
            books = SweepState(jobs, board, file, self.launcher.place_of)
            started = self.launcher.start(books, self.paths, self.paths.folder.name)
            refused = [j for j in jobs if j.outcome is Outcome.crashed and j.record is None]
            if len(refused) == len(jobs) and jobs and not any(t.trial.step_s for t in self.trials):
                raise EkeError(f"no trial was submitted: {refused[0].reason}")
            stopped = started.wait()
        # A stop signal ends the search, also if this trial has finished.
        cut_short = [j for j in jobs if j.outcome is None or j.outcome.exit_code == EXIT_RESUMABLE]
        if stopped or cut_short:
            raise KeyboardInterrupt

    def _measured(self, number: int, repeat: int, cell: SweepRun, job: Job | None) -> Measured:
        if job is None or job.record is None:
            reason = cell.reason or (job.reason if job else "") or "it has no record"
            return Measured(number, repeat, Trial(None), cell.outcome or "refused", reason)
        found = measured(
            number, repeat, job.record, job.folder, steps_to_pay(self.baseline),
            self.baseline.device.kind == "cuda",
            self.candidates.found[number].forecast.components.get("context", 0),
        )  # fmt: skip
        typed = next((t.loss for t in self.trials if t.number == self.candidates.first), None)
        if self.request.numerics is Numerics.same and is_higher(found.loss, typed):
            reason = f"its loss is higher: {found.loss:.4f}, not {typed:.4f}"
            found = replace(found, trial=replace(found.trial, step_s=None), reason=reason)
        return found


def keep_result(fitting: _Fitting, fit: Fit) -> None:
    """Write the results, and print their paths."""
    file, own = fitting.paths.folder / "fit.md", fitting.request.arguments.config_dir
    text, when = describe_fit(fit, fitting.baseline), datetime.now(UTC)
    command = shlex.join(["eke", "fit", *fitting.request.command])
    space = describe_candidates(fit.candidates, fitting.baseline, fitting.request.numerics)
    space += f"\n  tried: {len(fit.standings)}, by {format_number(len(fit.trials), 'trial')}"
    space += f" of at most {fitting.request.budget}"
    heading = f"# {command}\n\n{fitting.baseline.device.name}, {when.isoformat(timespec='seconds')}"
    write_atomic(file, f"{heading}\n\n```\n{space}\n\n{text}\n```\n")
    values = _values(command, fitting, fit)
    write_json(file.with_suffix(".json"), values)
    start = [*program().split(), *(["--config-dir", str(own)] if own else [])]
    winner = fit.best.candidate.overrides if fit.best else ()
    best, after = [*drop_overrides(fitting.typed, winner), *winner], list[str]()
    shown = describe_fit(fit, fitting.baseline, table_width(), width())
    verdict, _, table = shown.partition("\n")
    lines = wrap(f"{verdict} (measured)" if fit.best else verdict, width(), "", "  ")
    if fit.is_found:
        evidence = [*text.splitlines(), f"{file}"]
        composed, name = compose(best, own, in_sweep=True), fitting.option
        path = write_experiment(composed, name, own, own or conf_folder(), evidence)
        lines += [f"  {shlex.join([*start, f'experiment={name}'])}"]
        after = [f"written to {path}"]
    else:
        if fit.best is not None and fit.best is not fit.typed:
            lines += [f"  {shlex.join([*start, *best])}"]
            after += ["no option is written: your configuration may be as good"]
        path = free_path(own or conf_folder(), fitting.option)
        if path.exists():
            after += [f"{path} is the result of an earlier search, and is kept"]
    where = shlex.quote(short_path(file.parent))
    lines += [table, "", *after, f"{file}   (all trials: eke report {where})"]
    print_once(json.dumps(values, indent=2) if fitting.request.as_json else "\n".join(lines))


def _values(command: str, fitting: _Fitting, fit: Fit) -> dict[str, object]:
    gain, configurations = fit.gain, fit.candidates.found
    return {
        "schema_version": 1,
        "command": command,
        "objective": fit.objective.value,
        "numerics": fit.numerics.value,
        "device": fitting.baseline.device.name,
        "num_configurations": len(configurations),
        "refused": fit.candidates.refused,
        "num_too_large": fit.candidates.too_large,
        "best": list(fit.best.candidate.overrides) if fit.best else None,
        "option": fitting.option if fit.is_found else None,
        "gain": {**asdict(gain), "of": gain.of.value} if gain else None,
        "trials": [
            {
                "configuration": short_name(configurations[t.number], fitting.baseline),
                "overrides": list(configurations[t.number].overrides),
                "expected_s": configurations[t.number].point.expected_s,
                **asdict(t),
            }
            for t in fit.trials
        ],
    }


def prepare(request: TuneRequest) -> _Fitting:
    """Prepare a search up to its first trial. Raise ConfigError if it cannot run."""
    arguments, own = request.arguments, request.arguments.config_dir
    _check_request(request)
    launcher = find_launcher(launcher_of(arguments.overrides))
    try:
        composed = compose(arguments.overrides, own, in_sweep=True)
    except ConfigError as error:
        why = "a search starts from one value and tries others (of precision with --numerics mixed)"
        fix = Fix(remark="one value, or remove the key")
        problems = [replace(p, why=why, fix=fix) if p.fix.is_sweep else p for p in error.problems]
        raise ConfigError(problems) from error
    _check_keys(composed)
    usual = {request.objective: Objective.speed, request.numerics: Numerics.same}
    unusual = [str(wanted.value) for wanted, each in usual.items() if wanted is not each]
    # Searches with different goals have different options.
    option = request.name or "_".join(["fit", composed.choices["model"], *unusual])
    # Check the name before slow steps.
    free_path(own or conf_folder(), option, composed.config.plan_only)
    baseline = plan_for(composed, planning=True, launcher=launcher, reject=False)
    if not baseline.device.present and not composed.config.plan_only:
        why = f"this machine has no {baseline.device.name}, and a search runs trials"
        wanted = composed.config.hardware.option
        raise ConfigError(Problem("hardware", wanted, why, Fix("plan_only=true"), "absent_device"))
    axes = axes_for(baseline.choices, composed.overrides, baseline.device, request.numerics)
    composed = _without_recipe(composed, baseline)
    axes = [with_explicit_values(axis, baseline.config, composed, own) for axis in axes]
    if not composed.config.plan_only:
        # Plan the first trial of any size, unless it is cached: a package may be missing.
        first = trial_overrides(composed.overrides, cut_overrides(baseline), 0)
        trial = compose(first, own, in_sweep=True)
        planned = partial(plan_for, trial, launcher=launcher, reject=False, trace=False)
        plan_unless_answered(planned, launcher.place_of)

    def expected_step_s(plan: Plan) -> float | None:
        found = forecast_time(plan)
        return found.step_s.expected if isinstance(found, StepTime) else None

    line = PlanningLine()
    count = line.counter("checked", "combination")
    found = enumerate_candidates(baseline, composed, axes, own, expected_step_s, count)
    line.close()
    told = describe_candidates(found, baseline, request.numerics).splitlines()
    print_progress("\n".join(line for text in told for line in wrap(text, width(), "", "    ")))
    _check_choice(found, composed)
    points = [candidate.point for candidate in found.found]
    search = Search(points, request.objective, request.budget, found.first)
    which = [text for text in composed.overrides if not text.startswith("hydra")]
    words = ("fit", request.objective.value, request.numerics.value, *which)
    identity = sweep_id([words], [composed.config] if composed.config_dir else [])
    paths = sweep_paths(composed.config.paths.runs, identity)
    return _Fitting(request, composed.overrides, found, search, baseline, paths, launcher, option)


def _check_choice(found: Candidates, composed: Composed) -> None:
    """Raise ConfigError without two candidates, as a run gives the same result."""
    rules = ", ".join(sorted(found.refused))
    if not found.found:
        why = "no candidate fits into memory"
        if not found.too_large:
            why = f"rules reject all candidates: {rules}"
        fix = Fix(remark=f"eke plan --why {' '.join(composed.overrides)}")
        raise ConfigError(Problem("eke fit", "", why, fix, "no_candidates"))
    if len(found.found) > 1 or found.first is None:
        return
    reasons = ["groups that were set are kept"]
    reasons += [f"rules reject the rest: {rules}"] if found.refused else []
    reasons += ["larger configurations cannot fit"] if found.too_large else []
    why = f"your configuration is the only candidate ({'; '.join(reasons)})"
    again = shlex.join([*program().split(), *composed.overrides])
    fix = Fix(remark=f"{again}   (or leave a group open)")
    raise ConfigError(Problem("eke fit", "", why, fix, "no_candidates"))


def _without_recipe(composed: Composed, baseline: Plan) -> Composed:
    """Replace an adaptive recipe, which would decide for each candidate, by its decisions."""
    if composed.choices.get("recipe") not in RECIPES:
        return composed
    every = chosen_overrides(baseline, composed.config_dir)
    chosen = [text for text in every if group_of(text) != "batch"]  # the search chooses it
    typed = [text for text in composed.overrides if not text.startswith("recipe=")]
    return compose([*typed, *chosen], composed.config_dir, in_sweep=True)


def _check_request(request: TuneRequest) -> None:
    """Raise ConfigError unless the arguments are overrides of one configuration."""
    arguments = request.arguments
    one = "and a search starts from one configuration"
    problems = []
    if arguments.multirun:
        single = [word for word in request.command if word not in ("-m", "--multirun")]
        fix = Fix(remark=shlex.join(["eke", "fit", *single]))
        problems.append(Problem("-m", "", f"starts a sweep, {one}", fix, "not_for_fit"))
    if arguments.hydra_flags:
        flag, *values = arguments.hydra_flags
        question = shlex.join([*arguments.hydra_flags, *arguments.overrides])
        why = "shows one configuration, but a search has many"
        fix = Fix(remark=f"{program()} {question}")
        problems.append(Problem(flag, " ".join(values), why, fix, "not_for_fit"))
    for text in arguments.overrides:
        key, _, value = text.lstrip("+").partition("=")
        if (key == "sweep" and value != "none") or key.startswith("sweep."):
            why, fix = f"is for a set of runs, {one}", Fix("-m", *arguments.overrides)
            problems.append(Problem(key, value, why, fix, "not_for_fit"))
    if problems:
        raise ConfigError(problems)


def _check_keys(composed: Composed) -> None:
    """Raise ConfigError for keys of runs or sweeps that have no meaning for a search."""
    why = "is for one run, and finished trials are not repeated"
    wait = "has no effect on a search: each trial depends on earlier results"
    reasons = dict.fromkeys(("rerun", "repeat", "ignore_forecast"), why) | {"launcher.detach": wait}
    for key, why in reasons.items():
        if wanted := operator.attrgetter(key)(composed.config):
            default = type(wanted)()  # False or 0
            fix = Fix(f"{key}={default}".lower())
            raise ConfigError(Problem(key, str(wanted).lower(), why, fix, "not_for_fit"))


def fit(request: TuneRequest) -> int:
    """Search, write the result, and return the exit code."""
    try:
        fitting = prepare(request)
        if fitting.baseline.config.plan_only:
            return print_once("\n" + likely(fitting.candidates, fitting.search, fitting.baseline))
        found = fitting.run()
        keep_result(fitting, found)
        return EXIT_OK if found.best is not None else EXIT_FAILED
    except KeyboardInterrupt:
        return report_failure("\ninterrupted; the same command continues", EXIT_RESUMABLE)
