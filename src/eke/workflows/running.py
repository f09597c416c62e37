"""Run one plan, or return the record of a finished run."""

import json
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from eke.common.errors import ConfigError, RunError
from eke.common.files import read_json
from eke.common.paths import RunPaths, user_path
from eke.common.process_env import (
    check_started_ranks,
    check_started_tasks,
    current_cluster_task,
    my_rank,
)
from eke.common.screen import fields, is_quiet, is_verbose, paint, width
from eke.common.text import format_bytes, format_number
from eke.config.compose import Composed, compose
from eke.estimate.memory import expected_text, known_forecast, stop_tracing
from eke.estimate.time import forecast_time, time_line
from eke.launch.processes.multi_node import Coordinator, follow
from eke.launch.processes.run_dir import RunFolder, find_place, tracker_change_note
from eke.launch.processes.sweep import FOR_WRITING, run_single
from eke.launch.processes.worker_process import STOP_SIGNALS, become_worker
from eke.plan.planner import Plan, describe_model, length_of_run, render_plan
from eke.plan.record import EXIT_OK, EXIT_RESUMABLE, RECORD_LIMIT
from eke.results.report.run_result import result_lines
from eke.tuning.check_memory_fit import DOES_NOT_FIT
from eke.workflows import print_once
from eke.workflows.auto_batch import BatchSearchBudget
from eke.workflows.planning import plan_for, plan_text, remark_rows, single_run_budget


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


def run_composed(composed: Composed, as_json: bool = False) -> int:
    """Run on this machine, or as one of several tasks, and return the exit code."""
    task = current_cluster_task()
    check_started_tasks("a run", composed.config.ranks.num_nodes)
    means = single_run_budget(composed.config)
    if task.count == 1:
        planned = partial(plan_for, composed, means=means)
        return run_planned(plan_unless_answered(planned, find_place), as_json=as_json)
    invitation = user_path(composed.config.paths.runs) / f".nodes-{task.step}.json"
    if task.node:
        for listened in STOP_SIGNALS:  # the first node stops all processes together
            signal.signal(listened, lambda *_: None)
        follow(invitation, task, composed.config.ranks.timeout_s)
        return EXIT_OK
    with closing(Coordinator(invitation, task)) as head:
        return run_planned(plan_for(composed, planning=False, means=means), head, as_json)


def run_planned(plan: Plan, head: Coordinator | None = None, as_json: bool = False) -> int:
    """Run a plan, or print its final record, and return the exit code. `as_json`: all of it."""
    check_started_ranks(plan.ranks.option, plan.batch.world_size)
    place = find_place(plan)
    if place.record is not None:
        note = tracker_change_note(place.record, plan, str(place.paths.folder))
        lines = result_lines(place.record, place.paths.folder, True, note)
        _print_result(place.paths, lines, as_json)
        return place.record.exit_code
    if not is_quiet():
        print_once("\n".join([*_start_lines(plan, place.note), ""]), sys.stderr)
    if my_rank():
        become_worker(place.paths)
    stop_tracing()
    record = run_single(plan, place.paths, head)
    _print_result(place.paths, result_lines(record, place.paths.folder), as_json)
    return record.exit_code


def _print_result(paths: RunPaths, lines: list[str], as_json: bool) -> None:
    record = json.dumps(read_json(paths.record, RECORD_LIMIT), indent=2) if as_json else ""
    print_once(record or "\n".join(lines))


def _start_lines(plan: Plan, note: str) -> list[str]:
    """Return run, device, cost, remarks and the next command. With `-v`, also every setting."""
    device, config, steps = plan.device, plan.config, plan.steps
    found, (num_samples, length) = known_forecast(plan), length_of_run(plan)
    count = plan.batch.world_size * plan.batch.devices
    memory = f", {format_bytes(device.memory_bytes)}" if device.memory_bytes else ""
    if config.data.is_stream:
        length = f"{num_samples} samples of a stream"
    elif num_samples <= steps.num_train_samples:
        length = f"{num_samples} of {steps.num_train_samples} samples"
    data = f"{plan.choices['data']}, {length}"
    options = [plan.choices[group] for group in ("precision", "attention") if group in plan.choices]
    shown = ("compile", "distributed", "engine", "kernels", "memory", "offload", "peft")
    chosen = {group: plan.choices.get(group, "none") for group in shown}
    more = [f"{group}={name}" for group, name in chosen.items() if name not in ("none", "loop")]
    train = [
        config.optimizer.option, f"lr {config.optimizer.lr:g}", config.schedule.option,
        format_number(steps.warmup, "warm-up step"), *options, *more,
    ]  # fmt: skip
    tokens = f", {config.data.seq_len} tokens" if plan.size.tokens_per_sample else ""
    run = f"{describe_model(plan)}, {format_number(steps.total, 'step')}"
    rows = [
        ("run", f"{plan.run_id}, {run}"),
        ("device", f"{count} x " * (count > 1) + f"{device.name}{memory}"),
        ("memory", f"{found.verdict.value}, {expected_text(found)}"),
        ("data", f"{data}, {plan.batch.samples_per_step} per step{tokens}"),
        ("train", ", ".join(train)),
        ("time", time_line(forecast_time(plan))),
        *([("note", note)] if note else []),
        *remark_rows(plan, sys.stderr),
    ]
    lines = fields(rows, width(sys.stderr))
    stop = "Ctrl-C saves and stops" if config.train.save_on_signal else "Ctrl-C stops"
    folder = ["--config-dir", plan.config_dir] if plan.config_dir else []
    last = [f"details: {shlex.join(['eke', 'plan', *folder, *plan.overrides])}", stop]
    if len("   ".join(last)) <= width(sys.stderr):
        last = ["   ".join(last)]
    elif len(last[0]) > width(sys.stderr):
        last = [f"details: -v   {stop}"]
    lines += [paint(line, "dim", sys.stderr) for line in last]
    return [*lines, *(["", render_plan(plan)] if is_verbose() else [])]


def run_for_hydra(overrides: tuple[str, ...], config_dir: Path | None) -> float | None:
    """Run one job of Hydra's sweep, and return its objective, the final evaluation loss.

    Raises RunError for a failed run, and KeyboardInterrupt, which stops the sweep, for a stopped
    run.
    """
    composed = compose(overrides, config_dir, in_sweep=True)
    if composed.config.plan_only:
        print_once(plan_text(plan_for(composed, planning=True, means=BatchSearchBudget())))
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
