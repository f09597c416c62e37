"""Entry point of a cluster job: `python -m eke.launch.slurm.watcher SUBMISSION`, without torch.

Starts the worker of its array element and forwards SLURM's signals. Its exit code decides whether
the job is requeued. On several nodes, the watchers of the others follow the first.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from eke.common.errors import BusyError, EkeError
from eke.common.output import open_streams
from eke.common.paths import RunPaths
from eke.common.process_env import SlurmTask, current_cluster_task
from eke.common.text import format_number
from eke.hardware import choose_device, device_option, machine_fingerprint
from eke.launch.processes.multi_node import Coordinator, follow, launch_attempt
from eke.launch.processes.run_attempt import WORKER_PHASE, rebuild_record
from eke.launch.processes.run_dir import lock_run_folder
from eke.launch.processes.sweep import MAX_CRASHES, POLL_S, training_and_startup_s
from eke.launch.processes.worker_process import STOP_SIGNALS
from eke.launch.slurm import submission_file
from eke.launch.slurm.cluster_run import note_software
from eke.launch.slurm.scheduler import show_job
from eke.plan.planner import Plan, read_plan
from eke.plan.record import (
    EXIT_OK,
    EXIT_RESUMABLE,
    EXIT_USER,
    Failure,
    Outcome,
    Record,
    read_record,
    write_record,
)

_WRONG_NODE_PHASE = "node"
"""Failure phase of a run that this node cannot start."""

_STOP_SIGNAL_BY_OUTCOME = {
    Outcome.timeout: signal.SIGUSR2, Outcome.preempted: signal.SIGTERM,
    Outcome.cancelled: signal.SIGINT,
}  # fmt: skip
"""Signal to the worker, by the outcome that it then writes."""


def main(arguments: list[str]) -> int:
    """Run one element of an array to its end. Return the job's exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m eke.launch.slurm.watcher SUBMISSION\n")
        return EXIT_USER
    heard: list[int] = []
    for listened in STOP_SIGNALS:
        signal.signal(listened, lambda got, _: heard.append(got))
    try:
        file = Path(arguments[0])
        submission = submission_file.read_submission(file)
        task = os.environ.get("SLURM_ARRAY_TASK_ID", "0")
        if not task.isdecimal() or int(task) >= len(submission.runs):
            return _log(f"{file}: no element {task}", EXIT_USER)
        number = int(task)
        paths = RunPaths(Path(submission.runs[number]))
        mine = current_cluster_task()
        if mine.node:
            return _run_follower_node(paths, mine)
        ticket = submission_file.JobEntry(str(file), number)
        if mine.count == 1:
            return watch_run(paths, submission, ticket, heard)
        with closing(Coordinator(paths.invitation, mine)) as head:
            return watch_run(paths, submission, ticket, heard, head)
    except BusyError as error:
        return _log(f"{error}. This job leaves the run unchanged", error.exit_code)
    except EkeError as error:
        return _log(str(error), error.exit_code)
    except OSError as error:
        return _log(f"{error.filename}: {error.strerror}", EXIT_RESUMABLE)


def _run_follower_node(paths: RunPaths, task: SlurmTask) -> int:
    """Follow the first node to its end. It handles the signals. Raise EkeError without it."""
    plan, problem = read_plan(paths), ""
    try:
        for_this_node(plan)
    except EkeError as error:
        problem = str(error)
    follow(paths.invitation, task, plan.ranks.timeout_s, problem)
    return EXIT_OK


def watch_run(
    paths: RunPaths,
    submission: submission_file.Submission,
    ticket: submission_file.JobEntry,
    heard: list[int],
    head: Coordinator | None = None,
) -> int:
    """Start one run, again after a crash. Return the job's exit code. `heard`: signals so far."""
    known = submission_file.read_ticket(paths)
    if known and (known.submission, known.element) == (ticket.submission, ticket.element):
        ticket = known
    crashes = 0
    while True:
        before = read_record(paths)
        if before is not None and Outcome[before.outcome].is_final:
            _log(f"{paths.folder}: already {before.outcome}")
            return before.exit_code
        plan = read_plan(paths)
        if why := note_software(Path(ticket.submission), plan.config.slurm.command_prefix):
            _log(f"{paths.folder}: {why}")
            return _record_wrong_node(paths, plan, why, Outcome.refused).exit_code
        began = time.monotonic()
        record = _one_attempt(paths, heard, head)
        outcome = Outcome[record.outcome]
        moved = record.steps_done > (before.steps_done if before else 0)
        cause = f": {record.failure.message}" if record.failure else ""
        steps = format_number(record.steps_done, "step")
        _log(f"{paths.folder}: {record.outcome} after {steps}{cause}")
        # A run that made progress may have met a passing fault. A signal is a request to stop.
        if outcome is Outcome.crashed and not heard:
            crashes = 1 if moved else crashes + 1
            misplaced = record.failure is not None and record.failure.phase == _WRONG_NODE_PHASE
            if crashes < MAX_CRASHES and not misplaced and not (head and head.has_lost_one()):
                continue
        if outcome not in (Outcome.timeout, Outcome.preempted):
            return record.exit_code
        # Without this count, a run that never saves a step would be requeued forever.
        worths = [*ticket.worths, training_and_startup_s(record, before, time.monotonic() - began)]
        stalled = 0 if moved else ticket.stalled + 1
        ticket = replace(ticket, stalled=stalled, worths=worths[-submission.max_restarts :])
        submission_file.write_ticket(paths, ticket)
        if why := ticket.spent(submission.max_restarts):
            return _log(why, EXIT_RESUMABLE)
        return submission_file.REQUEUE_CODE


def _one_attempt(paths: RunPaths, heard: list[int], head: Coordinator | None = None) -> Record:
    """Start the worker and wait for it. Forward SLURM's stop signal once, with its reason."""
    plan = read_plan(paths)
    try:
        plan = for_this_node(plan)
        if head is not None:
            head.gather(plan.ranks.timeout_s)
    except EkeError as error:
        return _record_wrong_node(paths, plan, str(error))
    live = launch_attempt(plan, paths, head)
    why: Outcome | None = None
    try:
        while not live.is_over():
            if heard and why is None:
                why = reason_of(heard[0], os.environ)
                _log(f"{signal.Signals(heard[0]).name}: {why.name}. Saving the run")
                live.ask(_STOP_SIGNAL_BY_OUTCOME[why])
            time.sleep(POLL_S)
    finally:
        record = live.finish()
    return with_reason(paths, record, why, live.exit_code)


def with_reason(
    paths: RunPaths, record: Record, why: Outcome | None, exit_code: int | None = None
) -> Record:
    """Return the record of an interrupted run with SLURM's reason."""
    if why is None or record.outcome == why.name:
        return record
    # scancel signals every process, and a worker that has just started dies of it.
    silent = record.failure is not None and record.failure.phase == WORKER_PHASE
    died = silent and exit_code is not None and -exit_code in STOP_SIGNALS
    if Outcome[record.outcome] not in _STOP_SIGNAL_BY_OUTCOME and not died:
        return record
    record.outcome, record.exit_code = why.name, why.exit_code
    record.failure = None if died else record.failure
    write_record(paths, record)
    return record


def reason_of(
    number: int, environment: Mapping[str, str], show: Callable[[str], Mapping[str, str]] = show_job
) -> Outcome:
    """Return the reason for a signal from SLURM."""
    if number in (signal.SIGUSR1, signal.SIGUSR2):
        return Outcome.timeout
    if number == signal.SIGINT:
        return Outcome.cancelled
    # Preemption, the time limit itself and scancel all send SIGTERM. By the controller (22.05), a
    # preempted job is running or has one restart more, and a cancelled job is completing.
    array, index = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    job = show(f"{array}_{index}") if array else {}
    if job.get("Reason") == "TimeLimit" or job.get("JobState") == "TIMEOUT":
        return Outcome.timeout
    restarted = job.get("Restarts", "0") != environment.get("SLURM_RESTART_COUNT", "0")
    leaving = job.get("JobState") in ("COMPLETING", "CANCELLED")
    return Outcome.cancelled if leaving and not restarted else Outcome.preempted


def for_this_node(plan: Plan) -> Plan:
    """Return the plan with this node's facts. Raise EkeError if planned for another device."""
    device, _ = choose_device("auto" if plan.device.kind == "cuda" else "cpu")
    option = device_option(device.name)
    same = device.name == plan.device.name or (option and option == device_option(plan.device.name))
    if plan.device.kind == "cuda" and not same:
        fix = "choose nodes with resources.constraint or slurm.gpu_type, or plan for this node "
        fix += f"with hardware={option or 'NAME'}"
        raise EkeError(f"planned for {plan.device.name}, this node has {device.name}: {fix}")
    needed = plan.processes_per_node * plan.batch.devices
    if device.kind == "cuda" and device.count < needed:
        raise EkeError(f"needs {needed} GPUs, {device.count} visible in this job")
    return replace(plan, device=device, machine=machine_fingerprint(device))


def _record_wrong_node(
    paths: RunPaths, plan: Plan, why: str, outcome: Outcome = Outcome.crashed
) -> Record:
    """Record why no worker could start here. Raise BusyError if another process holds the run."""
    with lock_run_folder(paths):
        record = rebuild_record(paths, plan, outcome, Failure(_WRONG_NODE_PHASE, why))
        write_record(paths, record)
        return record


def _log(text: str, code: int = EXIT_OK) -> int:
    """Write a line into the job's log and return the exit code."""
    sys.stderr.write(time.strftime("%F %T ") + text + "\n")
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    open_streams("utf-8")
    sys.exit(main(sys.argv[1:]))
