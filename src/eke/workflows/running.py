"""Run one plan, or return the record of a finished run."""

import signal
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from eke.common.errors import ConfigError, RunError
from eke.common.paths import user_path
from eke.common.process_env import (
    check_started_ranks,
    check_started_tasks,
    current_cluster_task,
    my_rank,
)
from eke.config.compose import Composed, compose
from eke.estimate.memory import forecast_line, stop_tracing
from eke.estimate.time import forecast_time, time_line
from eke.launch.processes.multi_node import Coordinator, follow
from eke.launch.processes.run_dir import RunFolder, find_place
from eke.launch.processes.sweep import FOR_WRITING, run_single
from eke.launch.processes.worker_process import STOP_SIGNALS, become_worker
from eke.plan.planner import Plan, render_plan
from eke.plan.record import EXIT_OK, EXIT_RESUMABLE
from eke.results.report import render_summary
from eke.tuning.check_memory_fit import DOES_NOT_FIT
from eke.workflows import print_once
from eke.workflows.auto_batch import BatchSearchBudget
from eke.workflows.planning import plan_for, single_run_budget


def plan_unless_answered(
    planned: Callable[[bool], Plan], where: Callable[[Plan], RunFolder]
) -> Plan:
    """Return the plan of a run that can start now, or that has a final record."""
    try:
        return planned(False)
    except ConfigError as error:
        # Rules about the present state: free disk space, and free memory of shared devices.
        if not {problem.id for problem in error.problems} <= FOR_WRITING | {DOES_NOT_FIT}:
            raise
        try:
            plan = planned(True)
            answered = where(plan).record is not None
        except OSError:  # the folder's name or permissions are invalid
            raise error from None
        if not answered:
            raise
        return plan


def run_composed(composed: Composed) -> int:
    """Run on this machine, or as one of several tasks, and return the exit code."""
    task = current_cluster_task()
    check_started_tasks("a run", composed.config.ranks.num_nodes)
    means = single_run_budget(composed.config)
    if task.count == 1:
        planned = partial(plan_for, composed, means=means)
        return run_planned(plan_unless_answered(planned, find_place))
    invitation = user_path(composed.config.paths.runs) / f".nodes-{task.step}.json"
    if task.node:
        for listened in STOP_SIGNALS:  # the first node stops all processes together
            signal.signal(listened, lambda *_: None)
        follow(invitation, task, composed.config.ranks.timeout_s)
        return EXIT_OK
    with closing(Coordinator(invitation, task)) as head:
        return run_planned(plan_for(composed, planning=False, means=means), head)


def run_planned(plan: Plan, head: Coordinator | None = None) -> int:
    """Run a plan, or print its final record, and return the exit code."""
    check_started_ranks(plan.ranks.option, plan.batch.world_size)
    place = find_place(plan)
    if place.record is not None:
        print_once(render_summary(place.record, str(place.paths.folder)))
        print_once(f"  {place.note}")
        return place.record.exit_code
    print_once(f"{render_plan(plan)}\n  {forecast_line(plan)}")
    print_once(f"  {time_line(forecast_time(plan), plan.device.kind)}")
    if place.note:
        print_once(f"  {place.note}")
    if my_rank():
        become_worker(place.paths)
    print_once("")
    stop_tracing()
    record = run_single(plan, place.paths, head)
    print_once("\n" + render_summary(record, str(place.paths.folder)))
    return record.exit_code


def run_for_hydra(overrides: tuple[str, ...], config_dir: Path | None) -> float | None:
    """Run one job of Hydra's sweep, and return its objective, the final evaluation loss.

    Raises RunError for a failed run, and KeyboardInterrupt, which stops the sweep, for a stopped
    run.
    """
    composed = compose(overrides, config_dir, in_sweep=True)
    if composed.config.plan_only:
        print_once(render_plan(plan_for(composed, planning=True, means=BatchSearchBudget())))
        return None
    means = single_run_budget(composed.config)
    plan = plan_unless_answered(partial(plan_for, composed, means=means), find_place)
    place = find_place(plan)
    print_once(f"\n{' '.join(overrides)}")
    stop_tracing()
    record = place.record or run_single(plan, place.paths)
    print_once(f"  {record.outcome}: {place.note or place.paths.folder}")
    if record.exit_code == EXIT_RESUMABLE:
        raise KeyboardInterrupt
    if record.exit_code != EXIT_OK:
        why = f": {record.failure.message}" if record.failure else ""
        raise RunError(f"{record.outcome}{why} ({place.paths.log})")
    return record.loss.eval_final
