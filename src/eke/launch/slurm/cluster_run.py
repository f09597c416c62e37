"""One run in a cluster: its folder, its record, and the software of its jobs.

Nodes may have other software than the planning machine. Software counts as changed if the same
place has another version than the planner or an earlier job found there.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from eke.common.errors import BusyError, EkeError, RunError
from eke.common.files import append_line, read_json, read_text
from eke.common.paths import RunPaths
from eke.hardware import software_now, software_places
from eke.launch.processes.run_attempt import machine_of, rebuild_record
from eke.launch.processes.run_dir import lock_run_folder
from eke.launch.slurm.scheduler import OUT_OF_MEMORY, outcome_of
from eke.launch.slurm.submission_file import read_ticket
from eke.plan.identity import changed_fingerprint
from eke.plan.planner import Plan
from eke.plan.record import Failure, Outcome, Record, read_attempts, read_record, write_record
from eke.tuning.memory_advice import note_predictions

_STOPPED = (Outcome.preempted, Outcome.timeout)
"""Outcomes of a run that is resumed automatically."""


def changes_since_planning(paths: RunPaths, record: Record, plan: Plan) -> list[str]:
    """Return the changes of the planning machine, or of the training machine if it is unknown."""
    try:
        before = read_json(paths.planned_with)
    except (OSError, ValueError):
        before = None
    on_node = changed_fingerprint(record.machine, plan.machine)
    if not isinstance(before, dict) or not on_node:
        return on_node
    return changed_fingerprint(before, plan.machine)


@dataclass
class ClusterRun:
    """One run with a job."""

    plan: Plan
    paths: RunPaths
    last_state: str = ""
    """Last state of the job if it is over and known to SLURM."""
    stamp: int = 0
    """`stamp_of` an earlier job's record."""

    def finish(self) -> Record:
        """Return the run's record, or write it if the job left none. BusyError if it still runs."""
        try:
            record = self.newest()
            if record is None:
                return self.record_lost()
            stopped = Outcome[record.outcome] in _STOPPED
            if stopped and outcome_of(self.last_state) is Outcome.cancelled:
                return self.record_cancelled()
            return record
        except OSError as error:
            raise RunError(f"{self.paths.folder} cannot be written: {error.strerror}") from error

    def tells_all(self) -> bool:
        """Return whether the record has the cause. A stopped worker may not detect its cause."""
        with suppress(EkeError):
            record = self.newest()
            return record is not None and Outcome[record.outcome] not in _STOPPED
        return False

    def newest(self) -> Record | None:
        """Return the newest attempt's record, None if it precedes the job and is not final."""
        paths = self.paths
        record = read_record(paths)
        if record is None or Outcome[record.outcome].is_final:
            return record
        if self.stamp and stamp_of(paths) == self.stamp:
            return None
        return record if record.attempt >= len(read_attempts(paths)) - 1 else None

    def record_cancelled(self) -> Record:
        """Record the job as cancelled, so that it is not submitted again."""
        with lock_run_folder(self.paths):
            record = self.newest()
            if record is None or Outcome[record.outcome] not in _STOPPED:
                raise BusyError(f"run {self.paths.folder.name} has just been in use")
            record.outcome, record.exit_code = Outcome.cancelled.name, Outcome.cancelled.exit_code
            write_record(self.paths, record)
            return record

    def record_lost(self) -> Record:
        """Write the record of a job that left none."""
        paths, state, outcome = self.paths, self.last_state, outcome_of(self.last_state)
        with lock_run_folder(paths):
            if record := self.newest():
                return record
            told = state or "SLURM has no reason"
            told += _job_output_path(paths, outcome)
            failure = Failure("job", f"the job ended without a record: {told}")
            record = rebuild_record(paths, self.plan, outcome, failure)
            record.machine = machine_of(read_attempts(paths), self.plan)
            note_predictions(record, self.plan, state == OUT_OF_MEMORY)
            write_record(paths, record)
            return record


def _job_output_path(paths: RunPaths, outcome: Outcome) -> str:
    """Return the path of a job's output, to be appended to its failure."""
    ticket = read_ticket(paths)
    if ticket is None:
        return ""
    if ticket.log.exists():
        return f" (output: {ticket.log})"
    missing = f" (no output in {ticket.log}: is that folder shared with the nodes?)"
    return missing if outcome is Outcome.crashed else ""


def stamp_of(paths: RunPaths) -> int:
    """Return when a run's record was written, in ns, 0 without one."""
    with suppress(OSError):
        return paths.record.stat().st_mtime_ns
    return 0


def note_software(submission: Path, command_prefix: str = "") -> str:
    """Append this node's software to the submission's file. Return its changes, or ""."""
    file, now = submission.with_suffix(".software"), software_now()
    places = {  # the prefix may be an image, whose content may have moved
        part: f"{command_prefix} {folder if command_prefix else (folder, number)}"
        for part, (folder, number) in software_places().items()
    }
    mine = json.dumps([now, places])
    try:
        append_line(file, mine)
        lines = read_text(file).splitlines()
    except OSError:
        return ""
    for line in lines:
        if line == mine:
            break
        try:
            before, seen = json.loads(line)
        except (ValueError, TypeError):  # torn by a kill or a full disk
            continue
        shared = {part for part, place in places.items() if seen.get(part) == place}
        old, new = ({part: each[part] for part in shared} for each in (before, now))
        if changes := changed_fingerprint(old, new):
            told = f"the software changed since the sweep was started ({'; '.join(changes)})"
            return f"{told} -> start the sweep again"
    return ""
