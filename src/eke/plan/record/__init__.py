"""Outcomes, attempts, failed processes and records of runs. None means not measured."""

import contextlib
import functools
import json
import math
import os
import re
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import cattrs

from eke.common.errors import EkeError, Fix, Problem
from eke.common.files import append_line, read_json, read_text, terminate_last_line, write_json
from eke.common.paths import RunPaths, program
from eke.common.text import closest_path, first_line

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_RESUMABLE = 75
"""Exit code of an interrupted run, which the same command resumes (`EX_TEMPFAIL`)."""

USUAL_NAME = re.compile(r"([0-9a-f]{16})(-\d+)?")
"""Default name of a run's folder: the run id, for repeats with a number from 2."""


class Outcome(Enum):
    """Outcome of a run."""

    ok = "ok"
    oom = "oom"
    diverged = "diverged"
    timeout = "timeout"
    preempted = "preempted"
    crashed = "crashed"
    cancelled = "cancelled"
    refused = "refused"
    skipped = "skipped"

    @property
    def is_final(self) -> bool:
        """True if another attempt would have the same outcome."""
        return self in (Outcome.ok, Outcome.oom, Outcome.diverged)

    @property
    def exit_code(self) -> int:
        """Exit code of a process with this outcome."""
        if self is Outcome.ok:
            return EXIT_OK
        if self in (Outcome.timeout, Outcome.preempted, Outcome.cancelled):
            return EXIT_RESUMABLE
        return EXIT_USER if self is Outcome.refused else EXIT_FAILED


RECORD_VERSION = 1
"""Version of records. Increase it when a field changes its meaning or disappears."""


@dataclass
class Spread:
    """Median, percentiles and number of measurements of a quantity."""

    median: float
    p10: float
    p90: float
    n: int


@dataclass
class CalibratedStep:
    """Correction of a predicted step time by finished runs."""

    runs: int
    """Number of configurations that ran on this device with these libraries."""
    needed: int
    """Number of configurations needed. With fewer, the fields below are absent."""
    factor: float | None = None
    """Corrected / predicted step time."""
    within_frac: float | None = None
    """95th percentile of the relative error of the expected value."""
    versions: str = ""


@dataclass
class PredictedStep:
    """Estimated seconds of one optimizer step (eke.estimate.time.StepTime)."""

    low: float
    expected: float
    high: float
    parts: dict[str, float] = field(default_factory=dict)
    """Expected seconds by part: `compute`, `memory`, `optimizer`, `host`, `transfers`, ..."""
    limit: str = ""
    """Name of the largest part."""
    basis: str = ""
    notes: list[str] = field(default_factory=list)
    """Effects that are not modelled or only roughly."""
    calibrated: CalibratedStep | None = None


@dataclass
class Timing:
    """Durations in seconds. `steady_step_s` excludes the warm-up steps of `warmup_steps_s`."""

    clock: str | None = None
    """Begin of a step's time: `wall` is the end of the previous step (or of an evaluation or
    checkpoint after it), None (older records) the request for data, `mixed` both."""
    startup_s: float | None = None
    """From the start of the worker to the first training step: imports, model, data."""
    compile_s: float | None = None
    """Part of the first steps in torch.compile."""
    train_s: float | None = None
    """All training steps in their last attempt, without evaluation and checkpoints."""
    eval_s: float | None = None
    checkpoint_s: float | None = None
    steady_step_s: Spread | None = None
    """One optimizer step after warm-up."""
    predicted_step_s: PredictedStep | None = None
    """Estimate of `steady_step_s.median`, None for an unknown device."""
    warmup_steps_s: list[float] = field(default_factory=list)
    data_frac: float | None = None
    """Fraction of the steady steps' time spent waiting for data."""
    phases: dict[str, Spread] = field(default_factory=dict)
    """Seconds per step by phase: `between` (after the previous step), `data`, `forward`, ..."""

    @property
    def whole_s(self) -> float:
        """Seconds of the known parts, from the start of the worker to its end."""
        parts = (self.startup_s, self.train_s, self.eval_s, self.checkpoint_s)
        return sum(each or 0.0 for each in parts)


@dataclass
class Throughput:
    """Rates over the steady steps."""

    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    model_flops_per_s: float | None = None
    mfu_frac: float | None = None
    """Fraction of the device's datasheet peak for the compute format, None if unknown."""
    flops_formula: str = ""


@dataclass
class MeasuredMemory:
    """Measured bytes. On a CPU `peak_allocated_bytes` is from one profiled step."""

    basis: str = ""
    peak_allocated_bytes: int | None = None
    """Peak of allocated tensors, of the process with the largest one."""
    peak_reserved_bytes: int | None = None
    process_peak_bytes: int | None = None
    peak_per_rank_bytes: list[int | None] | None = None
    """`peak_allocated_bytes` by rank of a run with several. Other fields are from rank 0."""
    stages: dict[str, int] = field(default_factory=dict)
    """Memory after the stages `empty`, `kernels_loaded`, `weights` and `training`."""


@dataclass
class PredictedMemory:
    """Forecast of bytes on one device (eke.estimate.memory.Forecast)."""

    low: int
    expected: int
    high: int
    components: dict[str, int] = field(default_factory=dict)
    """Parts of the expected peak, which add up to it."""
    method: str = ""
    """`trace`, `upper_bound` or `closed_form`."""
    basis: str = ""
    allocated_bytes: int | None = None
    """Expected peak of allocated tensors (on a CPU for the measured micro-batch), comparable with
    `measured.peak_allocated_bytes`."""
    verdict: str = ""
    notes: list[str] = field(default_factory=list)
    """Reasons for the width of the range."""
    calibrated: dict[str, Any] | None = None
    """Correction by finished runs, only in old records."""


@dataclass
class MemoryRecord:
    """Predicted and measured memory."""

    predicted: PredictedMemory | None = None
    measured: MeasuredMemory | None = None
    advice: list[str] = field(default_factory=list)
    """Overrides with which an out-of-memory run should fit, cheapest first."""


@dataclass
class Loss:
    """Losses in nats per target (token or label)."""

    train_first: float | None = None
    train_final: float | None = None
    eval_start: float | None = None
    eval_final: float | None = None
    bits_per_byte_start: float | None = None
    """Evaluation loss in bits per byte of text, only for byte tokens."""
    bits_per_byte_final: float | None = None


IN_LOG = "  | "
"""Prefix of lines in a run's log that the starting command does not print."""


@dataclass
class Failure:
    """Cause of a failed run."""

    phase: str
    """`build`, `data`, `forward`, `backward`, `optimizer`, `eval`, `checkpoint` or `worker`, in a
    cluster also `node` (differs from the plan) or `job` (ended without a record)."""
    message: str
    traceback: str = ""
    lost_contact: bool = False
    """True if the cause is another process of the run, which ended or does not respond."""


@dataclass(frozen=True)
class Best:
    """Best evaluation of a run."""

    metric: str
    step: int
    value: float


@dataclass
class Record:
    """Record of a finished run, the only input of the report."""

    run_id: str
    name: str
    outcome: str
    exit_code: int
    attempt: int
    """Number of the attempt that wrote the record, from 0."""
    steps_done: int
    config: dict[str, Any]
    choices: dict[str, str]
    overrides: list[str]
    plan: dict[str, Any]
    """Derived part of the plan: device, batch, steps, compute, size, decisions, warnings."""
    machine: dict[str, str]
    environment: dict[str, Any]
    """Time, host, versions, git commit."""
    command: list[str]
    timing: Timing = field(default_factory=Timing)
    throughput: Throughput = field(default_factory=Throughput)
    memory: MemoryRecord = field(default_factory=MemoryRecord)
    loss: Loss = field(default_factory=Loss)
    best: Best | None = None
    """Evaluation of loss, metrics and classes with `train.keep_best`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation (`metrics.evaluation_metrics`), for a mix also `loss/NAME`."""
    classes: dict[str, Any] = field(default_factory=dict)
    """Metrics by class of a classifier: `names`, `precision`, `recall`, `f1`, `support`, and
    `confusion` (true class by predicted class) if samples have one class."""
    sources: dict[str, dict[str, float]] = field(default_factory=dict)
    """Trained `samples`, `epochs`, last `train_loss` and `eval_loss` by source of a mix."""
    effective: dict[str, Any] = field(default_factory=dict)
    """Settings read from the running objects instead of the plan."""
    warnings: list[str] = field(default_factory=list)
    failure: Failure | None = None
    shared_device: bool | None = None
    """True if another process used the device, so that timings are invalid, None if unknown."""
    schema_version: int = RECORD_VERSION

    @property
    def model_step(self) -> int:
        """Step of the final model's weights."""
        return self.best.step if self.best else self.steps_done


RECORD_LIMIT = 1 << 20
"""Largest file that is read as a record, bytes. A record has about 20,000."""


@dataclass(frozen=True)
class RankFailure:
    """Failure reported by a process other than rank 0."""

    attempt: int
    rank: int
    outcome: Outcome
    failure: Failure


@dataclass(frozen=True)
class DeadRank:
    """First process that ended, as observed by its parent."""

    attempt: int
    rank: int
    exit_code: int
    """Exit code, negative for a signal as in Python's subprocess."""
    node: int = 0


End = TypeVar("End", RankFailure, DeadRank)


def write_end(paths: RunPaths, end: RankFailure | DeadRank) -> None:
    """Write the end of a process atomically. Errors of a full disk are ignored."""
    path = paths.dead_rank(end.node) if isinstance(end, DeadRank) else paths.rank_failure(end.rank)
    with contextlib.suppress(OSError):
        write_json(path, cattrs.unstructure(end))


def read_ends(paths: RunPaths, kind: type[End], attempt: int) -> list[End]:
    """Return the readable ends of processes in this attempt, lowest rank first."""
    found = []
    for path in paths.folder.glob("rank_*.json" if kind is RankFailure else "dead_rank*.json"):
        with contextlib.suppress(OSError, ValueError, cattrs.BaseValidationError):
            found.append(cattrs.structure(read_json(path), kind))
    return sorted((end for end in found if end.attempt == attempt), key=lambda end: end.rank)


def read_dead_rank(paths: RunPaths, attempt: int) -> DeadRank | None:
    """Return the first process of this attempt that ended, None if unknown."""
    # Every node reports one process. The cause was killed by a signal or is not rank 0, since the
    # remaining processes fail with an ordinary exit code.
    found = read_ends(paths, DeadRank, attempt)
    return min(found, key=lambda dead: (dead.exit_code >= 0, dead.rank == 0), default=None)


def no_runs(
    folders: Sequence[Path], command: str, notes: Sequence[str] = (), usual: str = "runs"
) -> Problem:
    """Return the problem of folders without runs; `notes` are about unreadable runs.

    The fix is `eke COMMAND` with a similar folder that has runs, or with `usual`, else a first run.
    """
    why, meant = "contains no readable run or sweep", None
    if not any(folder.exists() for folder in folders):
        why = "no such folder"
        near = closest_path(folders[0]) if len(folders) == 1 else None
        meant = near if near is not None and _leads_to_runs(near) else None
    fix = Fix(remark=f"eke {command} {shlex.quote(str(meant)) if meant else usual}")
    if not meant and [*folders] == [Path(usual)]:
        fix = Fix(remark=f"{program()}   (or change to the folder that contains {usual})")
    return Problem("DIR", ", ".join(map(str, folders)), "; ".join([why, *notes]), fix, "no_runs")


def _leads_to_runs(folder: Path) -> bool:
    marks = ("sweep.json", "plan.json", "record.json")
    return any(any(folder.glob(f"{depth}{mark}")) for depth in ("", "*/") for mark in marks)


class UnreadableRecord(EkeError):
    """A record cannot be read now or by this version."""

    id = "unreadable"


class NoRecord(UnreadableRecord):
    """The file is not a record, or the record of another run."""


@functools.cache  # takes 20 ms, and sweeps read and write a thousand records
def _converter() -> cattrs.Converter:
    return cattrs.Converter(forbid_extra_keys=True)


def _check(value: Any, depth: int = 0) -> None:
    """Raise ValueError for values that `write_record` does not write."""
    if depth > 100:  # eke writes about ten levels
        raise ValueError("nested too deeply")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _check(each, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        raise ValueError("an integer of more than 64 bits")


def table(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a table in a record's untyped data, {} if it is missing or not a table."""
    found = data.get(key)
    return found if isinstance(found, dict) else {}


def write_record(paths: RunPaths, record: Record) -> None:
    """Write `record.json` atomically."""
    write_json(paths.record, _converter().unstructure(record))


def read_record(paths: RunPaths) -> Record | None:
    """Return the record of this run, None without one. This is the only reader of `record.json`.

    Raises:
        NoRecord: the file is not a record (empty, incomplete, a list), or it or the plan belongs to
            another run.
        UnreadableRecord: the file cannot be read now, or is of a newer version.
    """
    named, planned = _ids(paths)
    try:
        content = read_json(paths.record, RECORD_LIMIT)
    except FileNotFoundError:
        if named and planned not in ("", named):
            raise NoRecord(f"{paths.plan}: the plan of run {planned}, not of {named}") from None
        return None
    except OSError as error:
        raise UnreadableRecord(f"{paths.record}: {error.strerror or error}") from error
    except ValueError as error:
        raise NoRecord(f"{paths.record}: not a readable record ({first_line(error)})") from error
    if not isinstance(content, dict):
        raise NoRecord(f"{paths.record}: not a readable record (not an object)")
    version = content.get("schema_version")
    if version != RECORD_VERSION:
        is_newer = isinstance(version, int) and version > RECORD_VERSION
        raise (UnreadableRecord if is_newer else NoRecord)(
            f"{paths.record}: record version {version}, this eke reads {RECORD_VERSION}"
        )
    try:
        _check(content)
        record = _converter().structure(content, Record)
        Outcome(record.outcome)  # ValueError for an unknown outcome
    except Exception as error:  # an untrusted file may contain any value
        why = first_line(error)
        if isinstance(error, cattrs.BaseValidationError):
            why = "; ".join(cattrs.transform_error(error))[:300]
        raise NoRecord(f"{paths.record}: not a readable record ({why})") from error
    if record.run_id != (own := named or planned or record.run_id):
        raise NoRecord(f"{paths.record}: the record of run {record.run_id}, not of {own}")
    return record


def _ids(paths: RunPaths) -> tuple[str, str]:
    """Return a folder's run id from its name, and from its plan if it was renamed."""
    named, planned = USUAL_NAME.fullmatch(paths.folder.name), ""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        if named is None or not paths.record.exists():
            planned = str(read_json(paths.plan, RECORD_LIMIT)["run_id"])
    return named[1] if named else "", planned


def missing_run(outcome: str, folder: Path) -> str:
    """Return the message for a missing folder of a run with an outcome in the sweep's file."""
    if not outcome or folder.exists():
        return ""
    return f"{outcome} according to its sweep, but {folder} is missing (moved or not copied?)"


def start_attempt(
    paths: RunPaths, machine: dict[str, str], cut: dict[str, Any] | None = None
) -> int:
    """Record the start of a worker with `cut_of` its plan, and return the attempt's number."""
    attempt = len(read_attempts(paths))
    entry = {
        "attempt": attempt,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": time.time(),
        "machine": machine,
        "cut": cut,
    }
    terminate_last_line(paths.attempts)
    append_line(paths.attempts, json.dumps(entry))
    return attempt


def cuts_of(attempts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the different cuts of the attempts in order of first use."""
    found: list[dict[str, Any]] = []
    for each in attempts:
        if (cut := each.get("cut")) and cut not in found:
            found.append(cut)
    return found


def read_attempts(paths: RunPaths) -> list[dict[str, Any]]:
    """Read all attempts, oldest first. Incomplete lines and lines without object are skipped."""
    try:
        lines = read_text(paths.attempts, 4 * RECORD_LIMIT).splitlines()
    except OSError:
        return []
    entries = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            entries.append(json.loads(line))
    return [entry for entry in entries if isinstance(entry, dict)]
