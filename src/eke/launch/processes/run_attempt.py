"""A running run: start, probe and record."""

import dataclasses
import errno
import re
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from eke.common.errors import ChangedError, RunError
from eke.common.files import last_bytes, write_atomic
from eke.common.paths import RunPaths
from eke.config.schema import Batch, Tracker
from eke.hardware import environment
from eke.launch.processes.run_dir import lock_run_folder
from eke.launch.processes.worker_process import Worker, forward_signals
from eke.plan.planner import (
    Plan,
    check_software,
    outline_record,
    plan_to_plain,
    remove_swap,
    replan,
    swap_folder,
    write_plan,
)
from eke.plan.record import (
    Failure,
    Outcome,
    RankFailure,
    Record,
    metrics,
    read_attempts,
    read_dead_rank,
    read_ends,
    read_record,
    write_record,
)
from eke.tuning.memory_advice import note_predictions

LOG_LINES = 40
"""Lines of train.log in the record of a run that left none. A traceback has about thirty."""

WORKER_PHASE = "worker"
"""Failure phase of a worker that ended without a record."""

SECOND_SIGNAL_REASON = "killed by a second signal before saving"
"""Reason of a cancelled run that a second signal killed."""

TOO_EARLY = "stopped before training began"
"""Reason of a cancelled run whose worker did not yet handle signals."""


def finish_attempt(
    paths: RunPaths, plan: Plan, exit_code: int, attempts_before: int, cancelled: str = ""
) -> Record:
    """Return the ended attempt's record. Write it if the worker could not. `cancelled`: reason."""
    attempts = read_attempts(paths)
    attempt = len(attempts) - 1 if len(attempts) > attempts_before else attempts_before
    record = read_record(paths)
    if record is not None and record.attempt == attempt:
        return _with_failed_rank(paths, plan, record)
    rows, _ = metrics.read_rows(paths.metrics)
    tail = log_tail(paths)
    alone = Outcome.crashed, Failure(WORKER_PHASE, describe_exit(exit_code, tail), tail)
    outcome, failure = end_of_ranks(paths, attempt) or alone
    begun = attempts[attempt:]
    if cancelled:
        outcome, failure = Outcome.cancelled, Failure(WORKER_PHASE, cancelled)
    elif not begun and exit_code > 0:
        try:  # the worker may have failed to import eke
            check_software(plan)
        except ChangedError as error:
            outcome, failure = Outcome.refused, Failure(WORKER_PHASE, str(error))
    record = outline_record(plan, rows, attempt, outcome, failure)
    record.machine = machine_of(begun, plan)
    record.environment = environment()
    note_predictions(record, plan, not cancelled and _was_killed(paths, attempt, exit_code))
    write_record(paths, record)
    return record


def rebuild_record(paths: RunPaths, plan: Plan, outcome: Outcome, failure: Failure) -> Record:
    """Return the record of a run whose newest attempt left none, from its metrics."""
    rows, _ = metrics.read_rows(paths.metrics)
    return outline_record(plan, rows, max(0, len(read_attempts(paths)) - 1), outcome, failure)


def machine_of(attempts: Sequence[Mapping[str, Any]], plan: Plan) -> dict[str, str]:
    """Return the fingerprint taken by the newest attempt's worker, else the plan's."""
    return dict((attempts[-1].get("machine") if attempts else None) or plan.machine)


def _was_killed(paths: RunPaths, attempt: int, exit_code: int = 0) -> bool:
    """Return whether SIGKILL ended a process, as the kernel does when memory has run out."""
    dead = read_dead_rank(paths, attempt)
    return -signal.SIGKILL in (exit_code, dead.exit_code if dead else 0)


def _with_failed_rank(paths: RunPaths, plan: Plan, record: Record) -> Record:
    """Replace the failure "another process is gone" by the error of the process that failed."""
    if record.failure is None or not record.failure.lost_contact:
        return record
    dead = read_dead_rank(paths, record.attempt)
    found = end_of_ranks(paths, record.attempt)
    if found and (dead is None or dead.rank != 0):
        outcome, record.failure = found
        record.outcome, record.exit_code = outcome.name, outcome.exit_code
        note_predictions(record, plan, _was_killed(paths, record.attempt))
        write_record(paths, record)
    return record


def end_of_ranks(paths: RunPaths, attempt: int) -> tuple[Outcome, Failure] | None:
    """Return the failure of the lowest rank that wrote one, else of the process that died."""
    for found in read_ends(paths, RankFailure, attempt):
        message = f"process {found.rank} of this run: {found.failure.message}"
        return found.outcome, dataclasses.replace(found.failure, message=message)
    dead = read_dead_rank(paths, attempt)
    if dead is None:
        return None
    message = f"process {dead.rank} of this run: {describe_exit(dead.exit_code)}"
    return Outcome.crashed, Failure(WORKER_PHASE, message, log_tail(paths))


def describe_exit(code: int, tail: str = "") -> str:
    """Return the meaning of an exit without a record, with the last exception in the log."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)  # inherited by the worker
    limit = "the limit of CPU time is {} s: ulimit -t unlimited"
    if code == -signal.SIGKILL:
        memory = "by hand, or by the kernel because the host ran out of memory"
        return f"killed by SIGKILL: {memory}" + (f"; {limit.format(hard)}" if hard >= 0 else "")
    if code == -signal.SIGXCPU:
        return f"killed by SIGXCPU: {limit.format(soft)}"
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"killed by {names.get(-code, f'signal {-code}')}"  # real-time signals have no name
    raised = [line for line in tail.splitlines() if re.match(r"[\w.]+(Error|Exception): ", line)]
    told = f" ({raised[-1]})" if raised else ""
    return f"the worker ended with exit code {code} and without a record{told}"


def log_tail(paths: RunPaths) -> str:
    """Return the last lines of the worker's log."""
    with suppress(OSError):
        lines = last_bytes(paths.log, 1 << 20).decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])
    return ""


def write_plan_files(paths: RunPaths, plan: Plan) -> None:
    """Write a plan into its folder, for the worker and for users. Raise OSError on failure."""
    write_plan(paths, plan)
    text = yaml.safe_dump(plan_to_plain(plan)["config"], sort_keys=False)
    write_atomic(paths.config, f"# {' '.join(plan.overrides)}\n{text}")


class RunAttempt:
    """One attempt at a run, in a locked folder. Callers call `finish` once it is over."""

    def __init__(
        self, plan: Plan, paths: RunPaths, count: int, start: Callable[[int], Worker] | None = None
    ) -> None:
        """Lock the folder, write the plan into it and start the worker of `count` processes.

        `start` receives the lock, which the worker inherits. Raises BusyError if another process
        holds this run, RunError if it cannot be started.
        """
        self.plan, self.paths = plan, paths
        self._asked, self._given_up = 0, False
        self._held = ExitStack()
        try:
            lock = self._held.enter_context(lock_run_folder(paths))
            write_plan_files(paths, plan)
            self._attempts_before = len(read_attempts(paths))
            self.worker = start(lock) if start else Worker(paths, count, descriptors=[lock])
        except BaseException as error:
            self._held.close()
            if isinstance(error, OSError):
                raise _unwritable(paths.folder, error) from error
            raise

    @property
    def pid(self) -> int:
        """Process id of the worker, or of the process that started all workers."""
        return self.worker.process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the worker, negative for a signal. None while it runs."""
        return self.worker.process.returncode

    def is_over(self) -> bool:
        """Return whether the worker has ended."""
        return self.worker.is_over()

    def ask(self, number: int) -> None:
        """Forward a signal. The worker then saves a checkpoint and stops."""
        self._asked = number
        self.worker.ask(number)

    def kill(self) -> None:
        """Kill all processes of the run. After a stop request this cancels the run."""
        self._given_up = self._asked > 0 and not self.worker.is_over()
        self.worker.kill()

    def finish(self) -> Record:
        """End the worker and return the record. Raise RunError if the folder is not writable."""
        try:
            code = self.worker.finish()
            remove_swap(swap_folder(self.plan, self.paths))  # left by a killed worker
            dead = read_dead_rank(self.paths, self._attempts_before)
            cancelled = SECOND_SIGNAL_REASON if self._given_up else ""
            if self._asked and -self._asked in (code, dead.exit_code if dead else 0):
                cancelled = TOO_EARLY
            return finish_attempt(self.paths, self.plan, code, self._attempts_before, cancelled)
        except OSError as error:
            raise _unwritable(self.paths.folder, error) from error
        finally:
            self._held.close()


def _unwritable(folder: Path, error: OSError) -> RunError:
    why = error.strerror or error
    if error.errno in (errno.ENOMEM, errno.EAGAIN):
        return RunError(f"the machine cannot start another process: {why}")
    if error.filename and not Path(str(error.filename)).is_relative_to(folder):  # e.g. a program
        return RunError(f"{error.filename} cannot be used: {why}")
    return RunError(f"{folder} cannot be written: {why}")


_LIMIT_S = 900.0
"""Time limit of a probe in seconds. Compiling a large model takes minutes."""

_POLL_S = 0.05

_STEPS = 2
"""Steps of a probe: the first creates the optimizer's states, the second also needs them."""


class Probed(NamedTuple):
    """Result of a probe."""

    fits: bool | None
    """None if it ended for another reason than memory."""
    reason: str = ""
    """Why it did not fit, or which other error occurred, in one line."""


def probe(plan: Plan, start: Callable[[Plan, RunPaths], RunAttempt] | None = None) -> Probed:
    """Run a plan's trial, by default on all visible devices. KeyboardInterrupt if stopped."""
    running: list[RunAttempt] = []

    def kill(_: int = 0) -> None:
        for live in running:
            live.kill()

    with (
        tempfile.TemporaryDirectory(prefix="eke-probe-", ignore_cleanup_errors=True) as folder,
        forward_signals(kill, kill, "Stopping the probe.") as heard,
    ):
        paths = RunPaths(Path(folder) / "run")
        trial = trial_of(plan)
        live = start(trial, paths) if start else RunAttempt(trial, paths, trial.batch.world_size)
        running.append(live)
        deadline = time.monotonic() + _LIMIT_S
        while not (live.is_over() or heard or time.monotonic() > deadline):
            time.sleep(_POLL_S)
        too_long = not live.is_over() and not heard
        record = live.finish()
        found = _probe_outcome(record, paths, live.worker.process.wait())
    if heard:
        raise KeyboardInterrupt
    return Probed(None, f"it took longer than {_LIMIT_S:.0f} s") if too_long else found


def trial_of(plan: Plan) -> Plan:
    """Return the plan of the trial, which writes no checkpoint, model or tracker run."""
    config = plan.config
    batch = Batch(
        per_device=plan.batch.per_device,
        accumulation=min(plan.batch.accumulation, 2),  # gradients exist from the second on
        eval_per_device=plan.batch.eval_per_device,
    )
    train = dataclasses.replace(
        config.train, eval_every=None, checkpoint_every=None, save_final=False,
        stop_on_nonfinite=False,
    )  # fmt: skip
    tracker = Tracker(option="none")
    cut = replan(plan, dataclasses.replace(config, batch=batch, train=train, tracker=tracker))
    shape = cut.batch
    evaluated = shape.eval_per_device * shape.world_size * shape.devices
    steps = dataclasses.replace(
        plan.steps,
        total=_STEPS,
        per_epoch=_STEPS,
        warmup=0,
        num_train_samples=_STEPS * shape.samples_per_step,
        num_eval_samples=min(evaluated, plan.steps.num_eval_samples),
    )
    return dataclasses.replace(cut, steps=steps, probe=True)


def _probe_outcome(record: Record, paths: RunPaths, exit_code: int) -> Probed:
    """Return the memory outcome of a trial's record. SIGKILL counts as out of host memory."""
    if record.outcome == Outcome.ok.name:
        return Probed(True)
    if record.outcome == Outcome.oom.name:
        return Probed(False, "out of memory" + (f" in {f.phase}" if (f := record.failure) else ""))
    killed = _was_killed(paths, record.attempt, exit_code)
    reason = record.failure.message if record.failure else record.outcome
    return Probed(False if killed else None, reason)
