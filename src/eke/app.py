"""The whole flow, and the only file that knows it: compose, check, plan, launch, record, report."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import eke
from eke.check import Facts, check
from eke.compose import (
    Arguments,
    Composed,
    Expanded,
    answer_shell,
    check_question,
    compose,
    expand,
    help_text,
    is_completion,
    is_for_hydra,
    run_hydra_flags,
    split_arguments,
    sweep_by_hydra,
)
from eke.errors import ConfigError, EkeError, Problem, RunError
from eke.hardware import choose
from eke.launch import (
    Cell,
    Job,
    Pool,
    SweepFile,
    become_worker,
    check_started_ranks,
    find_devices,
    let_rank_0_speak,
    merge_duplicates,
    my_rank,
    open_board,
    place_of,
    run_single,
    sweep_exit_code,
    sweep_id,
    sweep_paths,
)
from eke.plan import Plan, make_plan, plan_to_plain, render_plan
from eke.pretrained import resolve_model, resolve_tokenizer
from eke.record import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, Outcome
from eke.report import PlanningLine, label_cells, render_cells, render_summary


def main(argv: Sequence[str], *, as_json: bool = False) -> int:
    """Everything behind `python train.py`; returns the exit code and shows no user a traceback.

    Args:
        argv: the command line without the program.
        as_json: print the plan for machines, with `plan_only=true`.
    """
    try:
        arguments = split_arguments(argv)
        if arguments.help:
            return say(help_text(arguments.config_dir))
        if arguments.version:
            return say(f"eke {eke.__version__}")
        if arguments.hydra_flags:
            return ask_hydra(arguments)
        if arguments.multirun:
            check_started_ranks("a sweep", 1)
            if is_for_hydra(arguments.overrides):
                sweep_by_hydra(arguments.overrides, arguments.config_dir, run_for_hydra)
                return EXIT_OK
            return sweep(arguments)
        return run(compose(arguments.overrides, arguments.config_dir), as_json)
    except EkeError as error:
        return complain(str(error), error.exit_code)
    except OSError as error:  # the disk is full, or a folder went away, between two runs
        return complain(f"{error.filename or 'a file'}: {error.strerror or error}", EXIT_FAILED)
    except KeyboardInterrupt:
        return complain("\ninterrupted; the same command continues", EXIT_RESUMABLE)


def plan_for(composed: Composed, planning: bool) -> Plan:
    """Check and plan one configuration.

    Raises:
        ConfigError: every rule it breaks.
    """
    device, reason = choose(composed.config.hardware.option)
    config = resolve_model(composed.config, composed.overrides, planning)
    config = resolve_tokenizer(config)
    refused, warned = check(Facts(config, device, planning))
    if refused:
        raise ConfigError(refused)
    warnings = [f"{p.path} = {p.value}: {p.why} ({p.fix})" for p in warned]
    return make_plan(config, composed.choices, composed.overrides, device, reason, warnings)


def run(composed: Composed, as_json: bool = False) -> int:
    """Plan, and unless only the plan is wanted, run it or answer from its record.

    Raises:
        ConfigError: the command is wrong.
    """
    pooled = [o.split("=", 1) for o in composed.overrides if o.startswith("launcher.")]
    if pooled:
        why = "is for the runs of a sweep, and this is a single run"
        command = f"python train.py -m {' '.join(composed.overrides)}"
        raise ConfigError([Problem(key, value, why, command) for key, value in pooled])
    plan = plan_for(composed, planning=composed.config.plan_only)
    if composed.config.plan_only:
        return say(json.dumps(plan_to_plain(plan), indent=2) if as_json else render_plan(plan))
    check_started_ranks(plan.config.distributed.option, plan.batch.world_size)
    place = place_of(plan)
    if place.record is not None:
        say(render_summary(place.record, str(place.paths.folder)))
        say(f"  {place.note}")
        return place.record.exit_code
    say(render_plan(plan))
    if place.note:
        say(f"  {place.note}")
    if my_rank():
        become_worker(place.paths)
    say("")
    record = run_single(plan, place)
    say("\n" + render_summary(record, str(place.paths.folder)))
    return record.exit_code


def run_for_hydra(overrides: tuple[str, ...], config_dir: Path | None) -> float | None:
    """One job of a sweep that Hydra runs: its objective is the loss at the end.

    Raises:
        ConfigError: a rule refuses the run.
        RunError: it did not end well.
        KeyboardInterrupt: somebody stopped it, and wants the next one no more than this one.
    """
    composed = compose(overrides, config_dir, in_sweep=True)
    plan = plan_for(composed, planning=composed.config.plan_only)
    if composed.config.plan_only:
        say(render_plan(plan))
        return None
    place = place_of(plan)
    say(f"\n{' '.join(overrides)}")
    record = place.record or run_single(plan, place)
    say(f"  {record.outcome}: {place.note or place.paths.folder}")
    if record.exit_code == EXIT_RESUMABLE:
        raise KeyboardInterrupt
    if record.exit_code != EXIT_OK:
        why = f": {record.failure.message}" if record.failure else ""
        raise RunError(f"{record.outcome}{why} ({place.paths.log})")
    return record.loss.eval_final


def sweep(arguments: Arguments) -> int:
    """Plan every cell before the first one runs, then run them on this machine's devices.

    Refused cells are listed and left out, equal ones run once, finished ones are answered from
    their records: the same command again finishes the sweep.
    """
    line = PlanningLine()
    expanded = expand(arguments.overrides, arguments.config_dir, line.composed)
    composed = [cell.composed for cell in expanded.cells]
    identity = sweep_id([cell.overrides for cell in expanded.cells])
    cells, plans = plan_cells(composed, f"sweep-{identity}", line.planned)
    line.close()
    duplicates = merge_duplicates(plans)
    say(f"sweep {identity}: {describe(cells, len(duplicates), expanded)}")
    rows = [cell.row for cell in expanded.cells]
    first = composed[0].config
    if first.plan_only:
        return say(render_cells([(cell, None) for cell in cells], rows))
    refuse_if_strict(cells, expanded)
    paths = sweep_paths(first.paths.runs, identity)
    labels = label_cells([cell.overrides for cell in expanded.cells], rows)
    jobs = make_jobs(labels, plans, duplicates)
    devices = {
        kind: find_devices(kind, first.launcher.cpu_slots, first.launcher.runs_per_device)
        for kind in {job.kind for job in jobs}
    }
    with open_board(len(cells)) as board:
        Pool(jobs, devices, board, SweepFile(paths, arguments.overrides, cells)).run()
    records = {number: job.record for job in jobs for number in job.cells}
    shown = [(cell, records.get(number)) for number, cell in enumerate(cells)]
    say(f"\n{render_cells(shown, rows)}\n\n  {paths.sweep}")
    return sweep_exit_code(cells)


def make_jobs(
    labels: Sequence[str], plans: Sequence[Plan | None], duplicates: Mapping[int, int]
) -> list[Job]:
    """One job for each run: a cell, and those that are the very same run."""
    jobs = {
        number: Job(number, labels[number], plan)
        for number, plan in enumerate(plans)
        if plan is not None and number not in duplicates
    }
    for number, first in duplicates.items():
        jobs[first].cells.append(number)
    return list(jobs.values())


def plan_cells(
    composed: Sequence[Composed], group: str, progress: Callable[[int, int], None]
) -> tuple[list[Cell], list[Plan | None]]:
    """Every cell with its plan, or refused with its reason; the tracker groups them by sweep."""
    cells: list[Cell] = []
    plans: list[Plan | None] = []
    for each in composed:
        each.config.tracker.group = each.config.tracker.group or group
        cell, plan = Cell(each.overrides), None
        try:
            plan = plan_for(each, planning=each.config.plan_only)
            cell.run_id = plan.run_id
        except ConfigError as error:
            cell.outcome, cell.reason = Outcome.refused.name, error.short()
        cells.append(cell)
        plans.append(plan)
        progress(len(cells), len(composed))
    return cells, plans


def refuse_if_strict(cells: Sequence[Cell], expanded: Expanded) -> None:
    """With `sweep.strict=true`, no run of a sweep starts when any of them cannot.

    Raises:
        ConfigError: there is a refused cell; each is named with its reason.
    """
    refused = [
        Problem(planned.name, "", cell.reason)
        for cell, planned in zip(cells, expanded.cells, strict=True)
        if cell.outcome == Outcome.refused.name
    ]
    if refused and expanded.strict:
        fix = "sweep.strict=false runs the others"
        raise ConfigError([*refused[:-1], replace(refused[-1], fix=fix)])


def describe(cells: Sequence[Cell], num_duplicates: int, expanded: Expanded) -> str:
    """How many cells there are, and how many of them will not run; what was left out, and why."""
    refused = sum(cell.outcome == Outcome.refused.name for cell in cells)
    parts = [f"{len(cells)} cells"]
    parts += [f"{refused} refused"] if refused else []
    parts += [f"{num_duplicates} the same as others"] if num_duplicates else []
    parts += [f"{each.count} excluded by {each.clause}" for each in expanded.excluded if each.count]
    return "\n  ".join([", ".join(parts), *(f"warning: {text}" for text in expanded.warnings)])


def ask_hydra(arguments: Arguments) -> int:
    """Hydra's own questions (`--cfg job`), answered by Hydra once the rest is known right."""
    if is_completion(arguments):
        sys.stdout.write(answer_shell(arguments.overrides))
        return EXIT_OK
    check_question(arguments)
    if not arguments.multirun:
        compose(arguments.overrides, arguments.config_dir)
    return run_hydra_flags(arguments)


def say(text: str) -> int:
    """Print for the user; returns the exit code of having said it. Of several ranks one speaks."""
    if not my_rank():
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    return EXIT_OK


def complain(text: str, code: int) -> int:
    """Say what went wrong, once for all ranks; returns the exit code."""
    if my_rank() and code != EXIT_RESUMABLE:
        let_rank_0_speak()
    if not my_rank():
        sys.stderr.write(text + "\n")
    return code
