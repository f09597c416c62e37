"""Plan a whole sweep, then start it with its launcher."""

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from eke.common.errors import ConfigError, EkeError, Fix, Problem
from eke.common.masking import masked
from eke.common.output import write_line
from eke.common.paths import short_path
from eke.common.plugins import LAUNCHERS, plugin_names
from eke.common.process_env import is_first, leave_tracked_run
from eke.common.screen import is_quiet, is_verbose, paint, table_width, width, wrap
from eke.common.table import Column, render_table
from eke.common.text import format_bytes, format_number, format_seconds
from eke.config.compose import Arguments, launcher_of
from eke.config.schema import Config, Sweep
from eke.config.sweep import Expanded, SweepCell, expand
from eke.data.sources import memoize_file_reads
from eke.estimate.memory import Forecast, Method, Verdict, as_json, known_forecast, stop_tracing
from eke.estimate.memory.render_memory import sweep_verdict
from eke.estimate.time import StepTime, Unknown, forecast_time, num_runs, speed_cell, sum_line
from eke.estimate.time import step_time_json as time_as_json
from eke.launch.interface import Launcher, StartedSweep, find_launcher
from eke.launch.processes.follow import watching
from eke.launch.processes.progress_table import open_board
from eke.launch.processes.run_dir import RunFolder
from eke.launch.processes.sweep import (
    RETRYABLE,
    Job,
    SweepFile,
    SweepRun,
    merge_duplicates,
    sweep_exit_code,
    sweep_id,
    sweep_paths,
)
from eke.launch.processes.sweep_scheduler import Rerun, SweepState, rerun_reasons, smallest_first
from eke.plan.planner import Plan
from eke.plan.record import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, Outcome
from eke.results.report.summary import (
    PlanningLine,
    describe_factors,
    factor_columns,
    label_cells,
    shared_overrides,
)
from eke.results.report.sweep_result import (
    Failed,
    SweepCellResult,
    failure_lines,
    means_over_repeats,
    outcome_line,
    result_table,
)
from eke.workflows import print_once
from eke.workflows.planning import (
    SIZE,
    check_memory_fit,
    means_of_a_cell,
    open_forecasts,
    plan_for,
    switched_off_tracker,
)
from eke.workflows.rounds import Rounds, find_repeat_problems, planned_lines, planned_repeats
from eke.workflows.running import plan_unless_answered


def sweep(arguments: Arguments, as_json: bool = False, trace: bool = False) -> int:
    """Plan every run before the first one starts, then run the sweep here or in a cluster.

    Rejected runs are listed and skipped, equal runs start once, finished runs are not repeated. So
    the same command finishes a sweep. `as_json` and `trace` as in `workflows.main`.
    """
    line = PlanningLine()
    expanded = expand(arguments.overrides, arguments.config_dir, line.counter("composed"))
    settings, first_round = expanded.settings, expanded.first_round()
    composed = [cell.composed for cell in first_round.cells]
    launcher = find_launcher(launcher_of(arguments.overrides))
    problems = find_repeat_problems(composed, settings)
    if problems := [*_check_detach(composed[0].config, launcher), *problems]:
        line.close()
        raise ConfigError(problems)
    own = [each.config for each in composed if each.config_dir]
    identity = sweep_id([each.overrides for each in composed], own, settings.rule)
    planning, count = composed[0].config.plan_only, line.counter("checked and planned")
    wanted = first_round.cells if planning else expanded.cells
    cells, plans = plan_cells(wanted, f"sweep-{identity}", count, launcher)
    if trace or not planning:
        trace_undecided_runs(cells, plans, line.counter("traced the memory of"))
    line.close()
    duplicates = merge_duplicates(plans)
    labels = label_cells([cell.overrides for cell in cells], [cell.row for cell in cells])
    jobs = make_jobs(labels, plans, duplicates)
    if as_json and planning:
        return print_once(json.dumps(_plain_plan(cells, plans, jobs, launcher, settings), indent=2))
    shown = cells[: len(first_round.cells)]
    num_same = sum(number < len(shown) for number in duplicates)
    unused = launcher.unused(arguments.overrides)
    unused += sorted(filter(None, {switched_off_tracker(each) for each in composed}))
    said = {text for plan in plans if plan for text in plan.warnings}
    warnings = [*first_round.warnings, *unused]
    warnings += sorted(text for text in said if text.startswith(f"{SIZE}="))
    first_lines = _verdict_lines(cells, plans) if planning else []
    head = f"sweep {identity}: {describe_sweep(shown, num_same, first_round)}"
    _show_head(first_lines, head, shown, warnings, sys.stdout if planning else sys.stderr)
    first = composed[0].config
    paths = sweep_paths(first.paths.runs, identity)
    if planning:
        _show_plan(cells, labels, plans, jobs, launcher, settings)
        if not is_quiet() and (preview := launcher.preview(jobs, paths, identity)):
            print_once("\n" + preview)
        return EXIT_OK
    _check_strict(shown, first_round)
    if is_verbose() and not as_json:
        _show_plan(cells, labels, plans, jobs, launcher, settings)
    options = arguments.config_dir  # the command is valid from any working directory
    words = ("--config-dir", str(options.absolute())) if options else ()
    command = ("-m", *words, *arguments.overrides)
    name = composed[0].choices.get("sweep", "none")
    file = SweepFile(paths, command, shown, "" if name == "none" else name)
    ordered = smallest_first(jobs, _bytes_at_risk)
    auto = Rounds(file, cells, ordered, settings) if settings.is_auto else None
    return run_planned_sweep(
        file, ordered, identity, launcher, first.launcher.detach, auto, as_json
    )


def _forecasts(plans: Sequence[Plan | None]) -> dict[int, tuple[Forecast, StepTime | Unknown]]:
    """Return cell number -> forecasts of memory and step time of its run, each on its device."""
    numbered = ((number, plan) for number, plan in enumerate(plans) if plan)
    return {number: (known_forecast(plan), forecast_time(plan)) for number, plan in numbered}


def _bytes_at_risk(plan: Plan) -> int | None:
    """Return the expected peak memory of a run that may not fit, else None."""
    found = known_forecast(plan)
    may_fail = found.verdict in (Verdict.tight, Verdict.does_not_fit)
    return found.peak.expected if may_fail else None


def _find_places(
    jobs: Sequence[Job], launcher: Launcher
) -> tuple[list[tuple[Job, RunFolder]], list[tuple[Job, EkeError]]]:
    """Return the place of each run, and the errors of unreadable records."""
    places, errors = list[tuple[Job, RunFolder]](), list[tuple[Job, EkeError]]()
    for job in jobs:
        try:
            places.append((job, launcher.place_of(job.plan)))
        except EkeError as error:
            errors.append((job, error))
    return places, errors


def _plain_plan(
    cells: Sequence[SweepRun],
    plans: Sequence[Plan | None],
    jobs: Sequence[Job],
    launcher: Launcher,
    settings: Sweep,
) -> list[dict[str, Any]]:
    """Return each cell with its forecasts, record and numbers of repeats, as JSON values."""
    forecasts = _forecasts(plans)
    places, errors = _find_places(jobs, launcher)
    known = {n: {"unreadable": str(error)} for job, error in errors for n in job.cells}
    for job, place in places:
        answer: dict[str, Any] = {"answered_by": str(place.paths.folder)} if place.record else {}
        answer |= {"done_again": list(place.outdated)} if place.outdated else {}
        known |= dict.fromkeys(job.cells, answer)
    repeats = {"repeats": numbers} if (numbers := planned_repeats(settings)) else {}
    plain = []
    for number, cell in enumerate(cells):
        content: dict[str, Any] = {"overrides": list(cell.overrides), "run_id": cell.run_id or None}
        if number in forecasts:
            memory, time = forecasts[number]
            content |= {"memory": as_json(memory)} | time_as_json(time)
        else:
            content |= {"outcome": cell.outcome, "rule": cell.rule or None, "reason": cell.reason}
        plain.append(content | known.get(number, {}) | repeats)
    return plain


def _word(cell: SweepRun) -> str:
    return "rejected" if cell.outcome == Outcome.refused.name else cell.outcome


def _verdict_lines(cells: Sequence[SweepRun], plans: Sequence[Plan | None]) -> list[str]:
    pairs = list(zip(cells, plans, strict=True))
    rejected = Counter(_word(cell) for cell, plan in pairs if plan is None)
    return sweep_verdict([(plan, known_forecast(plan)) for _, plan in pairs if plan], rejected)


def _show_plan(
    cells: Sequence[SweepRun],
    labels: Sequence[str],
    plans: Sequence[Plan | None],
    jobs: Sequence[Job],
    launcher: Launcher,
    settings: Sweep,
) -> None:
    """Print the forecasts of all runs. With `sweep.repeats=auto`, only of the first round."""
    if is_quiet():
        return
    found, rows, failed = _forecasts(plans), [], []
    for number, (cell, label, plan) in enumerate(zip(cells, labels, plans, strict=True)):
        if plan is None:
            rows.append((_word(cell), "", "", ""))
            failed.append(Failed(label, _word(cell), cell.reason))
            continue
        memory, time = found[number]
        step = "" if isinstance(time, Unknown) else format_seconds(time.step_s.expected)
        peak, verdict = format_bytes(memory.peak.expected), memory.verdict.value
        rows.append((verdict, peak, step, speed_cell(time)))
        about = (text for text in plan.warnings if text.startswith("memory: "))
        failed += [Failed(label, verdict, text) for text in about]
    titles, (verdicts, *numbers) = ("memory", "step", "samples/s"), zip(*rows, strict=True)
    columns = [
        Column("verdict", verdicts),
        *factor_columns([cell.overrides for cell in cells], [cell.row for cell in cells]),
        *(Column(*each, True, n) for n, each in enumerate(zip(titles, numbers, strict=True))),
    ]
    lines = render_table(columns, table_width())
    if failed:
        lines += ["", *failure_lines(failed)]
    if found:
        traced = sum(memory.method is not Method.closed_form for memory, _ in found.values())
        lines += ["", f"memory: expected, {traced} traced, {len(found) - traced} by formulas"]
    if times := [time for _, time in found.values() if isinstance(time, StepTime)]:
        corrected = sum(num_runs(each) > 0 for each in times)
        lines.append(f"step, samples/s: estimates, {corrected} of {len(times)} calibrated")
    print_once("\n" + "\n".join(lines))
    _show_finished(jobs, launcher)
    if jobs:  # each counted once
        kind, every = jobs[0].plan.device.kind, [forecast_time(job.plan) for job in jobs]
        sums = [*planned_lines(settings, every, kind), sum_line(every, kind)]
        print_once("\n" + "\n".join(sums))


def _show_finished(jobs: Sequence[Job], launcher: Launcher) -> None:
    """Print the number of finished runs, and reasons to repeat some of them."""
    found, errors = _find_places(jobs, launcher)
    places, told = [place for _, place in found], [f"{job.label}: {each}" for job, each in errors]
    if answered := sum(place.record is not None for place in places):
        told.append(f"answered from its record: {format_number(answered, 'finished run')}")
    if told := told + rerun_reasons(places):
        print_once("\n" + "\n".join(told))


def _check_detach(config: Config, launcher: Launcher) -> list[Problem]:
    """Return the problem of `launcher.detach` if the launcher cannot detach."""
    if not config.launcher.detach or launcher.can_detach:
        return []
    others = (find_launcher(name) for name in plugin_names(LAUNCHERS))
    other = next(each.name for each in others if each.can_detach)
    why = "this launcher's runs end with the supervising process"
    fix = Fix(f"hydra/launcher={other}", remark="or start it under tmux or nohup")
    return [Problem("launcher.detach", "true", why, fix, "not_detachable")]


def run_planned_sweep(
    file: SweepFile,
    jobs: Sequence[Job],
    identity: str,
    launcher: Launcher,
    detach: bool,
    auto: Rounds | None = None,
    as_json: bool = False,
) -> int:
    """Start a sweep or its rounds, wait unless it is detached, and return its exit code."""
    began = time.monotonic()
    stop_tracing()  # its processes would take memory from the runs
    if len(jobs) > 1:
        leave_tracked_run()
    with open_board(file) as board, watching(file.paths):
        rerun = Rerun(file.paths, jobs)
        if rerun.goes_on:
            anew = f"To start over: rm {shlex.quote(str(file.paths.rerun))}"
            board.note(f"rerun=true continues after the interruption. {anew}")
        place_of = partial(launcher.place_of, old=rerun.old)
        for batch in auto or [jobs]:
            started = launcher.start(SweepState(batch, board, file, place_of), file.paths, identity)
            if _is_interrupted(started, launcher, detach):
                break
        if auto and auto.is_over:
            rerun.jobs = [job for job in rerun.jobs if job in auto.jobs]
        rerun.end()
    if not started.goes_on():
        told = auto.outcome_lines() if auto else []
        code = sweep_exit_code(file.cells) if not auto or auto.is_over else EXIT_RESUMABLE
        result = _plain_outcome if as_json else _outcome_lines
        lines = result(file, auto.jobs if auto else jobs, told, code, time.monotonic() - began)
        print_once("\n".join(lines))
        return code
    folder, left = shlex.quote(str(file.paths.folder)), started.not_started()
    if left:
        why = left[0].waiting_for or "the command was interrupted"
        missing = format_number(len(left), "run")
        print_once(f"not submitted: {missing} ({why}). Repeat the command to submit them")
    print_once(f"the runs continue: eke status {folder}\nto stop them: eke cancel {folder}")
    if auto:
        print_once("repeat the command after this round to submit the next one")
    # A job script that requeues on this code repeats the command, which submits the rest.
    if left or not detach:
        return EXIT_RESUMABLE
    failed = any(job.outcome is Outcome.crashed for job in jobs)
    return EXIT_FAILED if failed else EXIT_OK


def _is_interrupted(started: StartedSweep, launcher: Launcher, detach: bool) -> bool:
    """Wait for runs unless they are detached, and return whether to start no further runs."""
    try:
        if not detach and started.wait():
            return True
    except KeyboardInterrupt:
        if not launcher.can_detach:
            raise
        print_once("")
        return True
    return started.goes_on()


def _results(file: SweepFile, jobs: Sequence[Job]) -> list[SweepCellResult]:
    records = {number: job.record for job in jobs for number in job.cells}
    return [
        SweepCellResult(cell.overrides, cell.row, cell.outcome, records.get(number))
        for number, cell in enumerate(file.cells)
    ]


def _outcome_lines(
    file: SweepFile, jobs: Sequence[Job], told: Sequence[str], code: int, seconds: float
) -> list[str]:
    """Return failures, the means over repeats, the decisions of the rounds and the next command."""
    results = _results(file, jobs)
    names = label_cells([cell.overrides for cell in file.cells], [cell.row for cell in file.cells])
    failed = []
    for cell, result, name in zip(file.cells, results, names, strict=True):
        advice = [*result.record.memory.advice] if result.record else []
        logs = f"eke logs {shlex.quote(short_path(Path(cell.folder)))}" if result.record else ""
        if cell.reason:
            failed.append(Failed(name, cell.outcome, cell.reason, advice[0] if advice else logs))
    lines = [outcome_line([cell.outcome for cell in file.cells], seconds), ""]
    lines += [*failure_lines(failed), ""] if failed else []
    lines += [*table, ""] if (table := result_table(means_over_repeats(results))) else []
    lines += [*told, ""] if told else []
    if file.problem:
        lines += wrap(f"{file.paths.sweep} is not up to date: {file.problem}", width(), "warning: ")
    where = shlex.quote(short_path(file.paths.folder))
    lines += ["interrupted: repeat the command to continue"] * (code == EXIT_RESUMABLE)
    again = any(cell.outcome in RETRYABLE for cell in file.cells)
    commands = [*[f"eke retry {where}"] * again, f"eke report {where}"]
    return [*lines, "next: " + "\n      ".join(commands)]


def _plain_outcome(
    file: SweepFile, jobs: Sequence[Job], told: Sequence[str], code: int, seconds: float
) -> list[str]:
    """Return the result of the sweep as JSON. Arguments as in `_outcome_lines`."""
    content = {
        "sweep": str(file.paths.folder), "exit_code": code, "seconds": seconds,
        "runs": [asdict(cell) for cell in file.cells],
        "means": means_over_repeats(_results(file, jobs)), "rounds": [*told],
    }  # fmt: skip
    return [json.dumps(masked(content), indent=2)]


def make_jobs(
    labels: Sequence[str], plans: Sequence[Plan | None], duplicates: Mapping[int, int]
) -> list[Job]:
    """Return one job per run, with the numbers of all its cells."""
    jobs = {
        number: Job(number, labels[number], plan)
        for number, plan in enumerate(plans)
        if plan is not None and number not in duplicates
    }
    for number, first in duplicates.items():
        jobs[first].cells.append(number)
    return list(jobs.values())


def plan_cells(
    expanded: Sequence[SweepCell],
    group: str,
    progress: Callable[[int, int], None],
    launcher: Launcher | None = None,
) -> tuple[list[SweepRun], list[Plan | None]]:
    """Return cells, with reasons for rejection, and plans. `group` is the tracker's."""
    cells, plans = list[SweepRun](), list[Plan | None]()
    launcher = launcher or find_launcher("local")
    with memoize_file_reads():
        for point in expanded:
            config = point.composed.config
            config.tracker.group = config.tracker.group or group
            cells.append(SweepRun(point.composed.overrides, row=point.row, round=config.repeat))
            try:
                means = means_of_a_cell(config, launcher)
                planned = partial(plan_for, point.composed, launcher=launcher, reject=True,
                                  trace=False, means=means)  # fmt: skip
                where = launcher.place_of
                plan = planned(True) if config.plan_only else plan_unless_answered(planned, where)
                launcher.request(plan)
            except ConfigError as error:
                cells[-1].reject(error)
                plans.append(None)
            else:
                cells[-1].run_id = plan.run_id
                plans.append(plan)
            progress(len(cells), len(expanded))
    return cells, plans


def trace_undecided_runs(
    cells: Sequence[SweepRun], plans: list[Plan | None], progress: Callable[[int, int], None]
) -> None:
    """Trace the runs whose fit is unknown by formulas. Reject in place those that do not fit."""
    allowed = {number: plan for number, plan in enumerate(plans) if plan}
    for number, forecast in open_forecasts(allowed, progress).items():
        try:
            plans[number] = check_memory_fit(allowed[number], found=forecast)
        except ConfigError as error:
            plans[number] = None
            cells[number].reject(error)


def _check_strict(cells: Sequence[SweepRun], expanded: Expanded) -> None:
    """With `sweep.strict=true`, raise ConfigError if a run is rejected."""
    refused = [
        Problem(planned.name, "", cell.reason, id=cell.rule)
        for cell, planned in zip(cells, expanded.cells, strict=True)
        if cell.outcome == Outcome.refused.name
    ]
    if refused and expanded.settings.strict:
        fix = Fix("sweep.strict=false", remark="starts the other runs")
        raise ConfigError([*refused[:-1], replace(refused[-1], fix=fix)])


def _show_head(
    first: list[str], text: str, cells: Sequence[SweepRun], warnings: Sequence[str], to: TextIO
) -> None:
    """Print the first lines, the numbers of runs, the overrides of all of them, and warnings."""
    shared = " ".join(shared_overrides([cell.overrides for cell in cells])) if cells else ""
    lines = first + ([] if is_quiet() else wrap(text, width(to)))
    lines += wrap(shared, width(to), "shared: ") if shared and not is_quiet() else []
    for warning in warnings:
        lines += wrap(warning, width(to), f"{paint('warning', 'yellow', to)}: ")
    if is_first() and lines:
        write_line("\n".join(lines), to)


def describe_sweep(cells: Sequence[SweepRun], num_duplicates: int, expanded: Expanded) -> str:
    """Return the numbers of runs, factors, and rejected, equal and excluded runs, with reasons."""
    outcomes = Counter(cell.outcome for cell in cells)
    numbers = {
        "rejected": outcomes[Outcome.refused.name],
        "that cannot start now": outcomes[Outcome.crashed.name],
        "the same as others": num_duplicates,
        **{f"excluded by {clause}": n for clause, n in expanded.excluded.items()},
    }
    parts = [f"{number} {text}" for text, number in numbers.items() if number]
    runs = describe_factors([cell.overrides for cell in cells], [cell.row for cell in cells])
    return ", ".join([runs, *parts])
