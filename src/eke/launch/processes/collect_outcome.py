"""How a run ended, once its process is gone: the written outcome, or why there is none."""

import dataclasses
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from eke.common.errors import ChangedError
from eke.common.files import last_bytes
from eke.common.paths import RunPaths
from eke.estimate.time import note_predictions
from eke.hardware import environment
from eke.plan.planner import Plan, check_software, outline_record
from eke.plan.record import (
    Failure,
    Outcome,
    Record,
    metrics,
    read_attempts,
    read_dead_rank,
    read_rank_failures,
    read_record,
    write_record,
)

LOG_LIMIT = 1 << 20
"""Bytes of train.log among which they are."""

LOG_LINES = 40
"""Lines of train.log that go into the record of a run that died without a word: a traceback through
Accelerate and torch has thirty."""


IMPATIENCE = "killed by a second signal before it had saved"
"""Why a run is cancelled that was asked to stop, and then not waited for."""


def settle(
    paths: RunPaths, plan: Plan, exit_code: int, attempts_before: int, given_up: bool = False
) -> Record:
    """The record of the attempt that just ended; written here when the worker could not.

    No exit code overrides a written outcome.

    Args:
        paths: the run folder.
        plan: what was to be done.
        exit_code: subprocess's: negative for a signal.
        attempts_before: attempts on disk before this one.
        given_up: it was asked to stop, and killed because somebody would not wait.
    """
    attempts = read_attempts(paths)
    attempt = len(attempts) - 1 if len(attempts) > attempts_before else attempts_before
    record = read_record(paths)
    if record is not None and record.attempt == attempt:
        return name_the_culprit(paths, plan, record)
    rows, _ = metrics.read_rows(paths.metrics)
    tail = log_tail(paths)
    alone = Outcome.crashed, Failure("worker", describe_exit(exit_code, tail), tail)
    outcome, failure = end_of_ranks(paths, attempt) or alone
    begun = attempts[attempt:]
    if given_up:
        outcome, failure = Outcome.cancelled, Failure("worker", IMPATIENCE)
    elif not begun and exit_code > 0:
        try:  # it may not even have been imported, to say so itself
            check_software(plan)
        except ChangedError as error:
            outcome, failure = Outcome.refused, Failure("worker", str(error), tail)
    record = outline_record(plan, rows, attempt, outcome, failure)
    record.machine = machine_of(begun, plan)
    record.environment = environment()
    note_predictions(record, plan, not given_up and was_killed(paths, attempt, exit_code))
    write_record(paths, record)
    return record


def machine_of(attempts: Sequence[Mapping[str, Any]], plan: Plan) -> dict[str, str]:
    """The fingerprint that the worker of the newest attempt took; the plan's where it took none."""
    return dict((attempts[-1].get("machine") if attempts else None) or plan.machine)


def was_killed(paths: RunPaths, attempt: int, exit_code: int = 0) -> bool:
    """Whether a process was ended as the kernel ends one when memory has run out."""
    dead = read_dead_rank(paths, attempt)
    return -signal.SIGKILL in (exit_code, dead.exit_code if dead else 0)


def name_the_culprit(paths: RunPaths, plan: Plan, record: Record) -> Record:
    """Replace "another process is gone" by what that process, or whoever saw it end, says."""
    if record.failure is None or not record.failure.lost_contact:
        return record
    dead = read_dead_rank(paths, record.attempt)
    found = end_of_ranks(paths, record.attempt)
    if found and (dead is None or dead.rank != 0):
        outcome, record.failure = found
        record.outcome, record.exit_code = outcome.name, outcome.exit_code
        note_predictions(record, plan, was_killed(paths, record.attempt))
        write_record(paths, record)
    return record


def end_of_ranks(paths: RunPaths, attempt: int) -> tuple[Outcome, Failure] | None:
    """How the first of several processes ended; None when nobody knows."""
    for told in read_rank_failures(paths, attempt):
        message = f"process {told.rank} of this run: {told.failure.message}"
        return Outcome[told.outcome], dataclasses.replace(told.failure, message=message)
    dead = read_dead_rank(paths, attempt)
    if dead is None:
        return None
    message = f"process {dead.rank} of this run: {describe_exit(dead.exit_code)}"
    return Outcome.crashed, Failure("worker", message, log_tail(paths))


def describe_exit(code: int, tail: str = "") -> str:
    """What an exit without a record means, with the exception that ended it, if the log has one."""
    if code == -signal.SIGKILL:
        return "killed by SIGKILL: by hand, or by the kernel because the machine ran out of memory"
    if code == -signal.SIGXFSZ:
        return "killed by SIGXFSZ: a file grew larger than `ulimit -f` allows"
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"killed by {names.get(-code, f'signal {-code}')}"  # real-time signals have no name
    raised = [line for line in tail.splitlines() if re.match(r"[\w.]+(Error|Exception): ", line)]
    told = f" ({raised[-1]})" if raised else ""
    return f"the worker ended with exit code {code} and left no record{told}"


def log_tail(paths: RunPaths) -> str:
    """The last lines of the worker's log."""
    try:
        lines = last_bytes(paths.log, LOG_LIMIT).decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-LOG_LINES:])
