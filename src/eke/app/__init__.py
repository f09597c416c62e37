"""The whole flow, and the only file that knows it: compose, check, plan, launch, record, report."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import eke
from eke.app.batching import Means, means_of_a_run
from eke.app.forecasting import (
    asks_for_all_devices,
    compare_on_all_devices,
    plan_text,
    refuse_why_of_many,
)
from eke.app.planning import plan_for, without_cluster
from eke.app.sweep import FORKED_THERE, plan_cells, sweep
from eke.app.talk import complain, say
from eke.compose import (
    Arguments,
    Composed,
    answer_shell,
    check_question,
    compose,
    help_text,
    is_completion,
    is_for_hydra,
    launcher_of,
    run_hydra_flags,
    split_arguments,
    sweep_by_hydra,
)
from eke.errors import ConfigError, EkeError, Problem, RunError
from eke.forecast import forecast_line
from eke.launch import (
    STOP_SIGNALS,
    Head,
    become_worker,
    check_started_ranks,
    check_started_tasks,
    follow,
    my_rank,
    place_of,
    run_single,
    this_task,
)
from eke.pace import forecast_time, time_line
from eke.paths import user_path
from eke.plan import Plan, render_plan
from eke.record import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE
from eke.report import render_summary

__all__ = ["main", "plan_cells", "plan_for", "run_for_hydra"]


def main(
    argv: Sequence[str], *, as_json: bool = False, why: bool = False, trace: bool = False
) -> int:
    """Everything behind `python train.py`; returns the exit code and shows no user a traceback.

    Args:
        argv: the command line without the program.
        as_json: print the plan for machines, with `plan_only=true`.
        why: also what would make it fit into memory, with `plan_only=true`.
        trace: spend seconds on a trace of its memory, with `plan_only=true`.
    """
    try:
        arguments = split_arguments(argv)
        if arguments.help:
            return say(help_text(arguments.config_dir))
        if arguments.version:
            return say(f"eke {eke.__version__}")
        if arguments.hydra_flags:
            return ask_hydra(arguments)
        refuse_why_of_many(arguments, why)
        if asks_for_all_devices(arguments):
            return say(compare_on_all_devices(arguments, as_json_text=as_json, trace=trace))
        if arguments.multirun or launcher_of(arguments.overrides) == "slurm":
            check_started_ranks("a sweep", 1)
            check_started_tasks("a sweep", 1)
            if is_for_hydra(arguments.overrides):
                sweep_by_hydra(arguments.overrides, arguments.config_dir, run_for_hydra)
                return EXIT_OK
            return sweep(arguments, as_json, trace)
        return run(compose(arguments.overrides, arguments.config_dir), as_json, why, trace)
    except EkeError as error:
        return complain(str(error), error.exit_code)
    except OSError as error:  # the disk is full, or a folder went away, between two runs
        return complain(f"{error.filename or 'a file'}: {error.strerror or error}", EXIT_FAILED)
    except KeyboardInterrupt:
        return complain("\ninterrupted; the same command continues", EXIT_RESUMABLE)


def run(composed: Composed, as_json: bool = False, why: bool = False, trace: bool = False) -> int:
    """Plan, and unless only the plan is wanted, run it or answer from its record.

    Raises:
        ConfigError: the command is wrong.
    """
    for text in without_cluster(composed.overrides):
        say(f"  warning: {text}")
    pooled = [o.split("=", 1) for o in composed.overrides if o.startswith("launcher.")]
    if pooled:
        reason = "is for the runs of a sweep, and this is a single run"
        command = f"python train.py -m {' '.join(composed.overrides)}"
        raise ConfigError([Problem(key, value, reason, command) for key, value in pooled])
    if composed.config.plan_only:
        plan = plan_for(composed, planning=True, means=Means(trace=trace))
        return say(plan_text(plan, as_json_text=as_json, why=why, trace=trace))
    task = this_task()
    check_started_tasks("a run", composed.config.distributed.num_nodes)
    means = means_of_a_run(composed.config)
    if task.count == 1:
        return run_planned(plan_for(composed, planning=False, means=means))
    invitation = user_path(composed.config.paths.runs) / f".nodes-{task.step}.json"
    if task.node:
        for listened in STOP_SIGNALS:  # the first machine asks its processes, and all agree
            signal.signal(listened, lambda *_: None)
        follow(invitation, task, composed.config.distributed.timeout_s)
        return EXIT_OK
    with Head(invitation, task) as head:
        return run_planned(plan_for(composed, planning=False, means=means), head)


def run_planned(plan: Plan, head: Head | None = None) -> int:
    """Run a plan, or answer from its record; returns the exit code.

    Args:
        plan: what is to be done.
        head: knows the other machines of a run that has several.
    """
    check_started_ranks(plan.config.distributed.option, plan.batch.world_size)
    place = place_of(plan)
    if place.record is not None:
        say(render_summary(place.record, str(place.paths.folder)))
        say(f"  {place.note}")
        return place.record.exit_code
    say(f"{render_plan(plan)}\n  {forecast_line(plan)}")
    say(f"  {time_line(forecast_time(plan), plan.device.kind)}")
    if place.note:
        say(f"  {place.note}")
    if my_rank():
        become_worker(place.paths)
    say("")
    record = run_single(plan, place, head)
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
    if composed.config.launcher.fork_server:
        raise ConfigError(FORKED_THERE)
    planning = composed.config.plan_only
    means = Means() if planning else means_of_a_run(composed.config)
    plan = plan_for(composed, planning=planning, means=means)
    if planning:
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


def ask_hydra(arguments: Arguments) -> int:
    """Hydra's own questions (`--cfg job`), answered by Hydra once the rest is known right."""
    if is_completion(arguments):
        sys.stdout.write(answer_shell(arguments.overrides))
        return EXIT_OK
    check_question(arguments)
    if not arguments.multirun:
        compose(arguments.overrides, arguments.config_dir)
    return run_hydra_flags(arguments)
