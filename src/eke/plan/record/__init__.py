"""Outcomes, attempts, ends of processes, and a run's record, in which None is not measured."""

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
from eke.common.files import append_line, read_json, read_text, seal, write_json
from eke.common.paths import RunPaths
from eke.common.text import closest_path, first_line

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_RESUMABLE = 75
"""`EX_TEMPFAIL` of sysexits.h: interrupted, the same command continues it."""

USUAL_NAME = re.compile(r"([0-9a-f]{16})(-\d+)?")
"""Name of a run's folder: its run id, and a number from 2."""


class Outcome(Enum):
    """How a run ended."""

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
        """Whether running the same thing again would only repeat it."""
        return self in (Outcome.ok, Outcome.oom, Outcome.diverged)

    @property
    def exit_code(self) -> int:
        """What the process that reports this outcome exits with."""
        if self is Outcome.ok:
            return EXIT_OK
        if self in (Outcome.timeout, Outcome.preempted, Outcome.cancelled):
            return EXIT_RESUMABLE
        return EXIT_USER if self is Outcome.refused else EXIT_FAILED


RECORD_VERSION = 1
"""Raise it when a field changes its meaning or disappears; a reader of an older version refuses."""


@dataclass
class Spread:
    """A sample of one quantity."""

    median: float
    p10: float
    p90: float
    n: int


@dataclass
class CalibratedStep:
    """What finished runs made of a predicted step time."""

    runs: int
    """Different configurations that ran on this device, with these libraries."""
    needed: int
    """Of them before anything is corrected: with fewer, the rest is absent."""
    factor: float | None = None
    """Corrected over predicted."""
    within_frac: float | None = None
    """Relative error of the expected value that 95 % of runs stay below."""
    versions: str = ""


@dataclass
class PredictedStep:
    """The time model's estimate (eke.estimate.time.StepTime): seconds of one optimizer step."""

    low: float
    expected: float
    high: float
    parts: dict[str, float] = field(default_factory=dict)
    """Expected seconds of each: `compute`, `memory`, `optimizer`, `host`, `transfers`, ..."""
    limit: str = ""
    """Name of the largest part."""
    basis: str = ""
    """What the device's rates are known from."""
    notes: list[str] = field(default_factory=list)
    """What is not modelled, or only widely."""
    calibrated: CalibratedStep | None = None


@dataclass
class Timing:
    """Seconds. Steps of the warm-up are in `warmup_steps_s`, never in `steady_step_s`."""

    clock: str | None = None
    """What a step's time is. `wall`: a step begins where the one before ended, unless an evaluation
    or a checkpoint lay between; None, in older records: where it asks for data; `mixed`: both."""
    startup_s: float | None = None
    """From the start of the worker to the first training step: imports, model, data."""
    compile_s: float | None = None
    """Share of the first steps spent in torch.compile's own phases."""
    train_s: float | None = None
    """All training steps, each as it was done last; without evaluation and checkpoints."""
    eval_s: float | None = None
    checkpoint_s: float | None = None
    steady_step_s: Spread | None = None
    """One optimizer step after warm-up."""
    predicted_step_s: PredictedStep | None = None
    """What was expected of `steady_step_s.median`; None where nothing is known of the device."""
    warmup_steps_s: list[float] = field(default_factory=list)
    data_frac: float | None = None
    """Share of the steady steps' time that was spent waiting for data."""
    phases: dict[str, Spread] = field(default_factory=dict)
    """Seconds per step spent `between` it and the one before (writing metrics), in `data`,
    `forward`, `backward` and `optimizer`."""


@dataclass
class Throughput:
    """Rates over the steady steps."""

    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    """Tokens that are not padding."""
    model_flops_per_s: float | None = None
    mfu_frac: float | None = None
    """Share of the device's datasheet peak for the compute format; None when that is unknown."""
    flops_formula: str = ""


@dataclass
class MeasuredMemory:
    """Bytes. On a CPU, `peak_allocated_bytes` is the tensor allocator's in one profiled step."""

    basis: str = ""
    """Description of the measurement."""
    peak_allocated_bytes: int | None = None
    """Of several processes, the largest one's."""
    peak_reserved_bytes: int | None = None
    process_peak_bytes: int | None = None
    """Resident memory of the process at its highest."""
    peak_per_rank_bytes: list[int | None] | None = None
    """`peak_allocated_bytes` of each process of a run that has several; the rest is rank 0's."""
    stages: dict[str, int] = field(default_factory=dict)
    """Memory after each of the guides' stages: `empty`, `kernels_loaded`, `weights`, `training`."""


@dataclass
class PredictedMemory:
    """The forecast (eke.estimate.memory.Forecast): bytes that one device must have room for."""

    low: int
    expected: int
    high: int
    components: dict[str, int] = field(default_factory=dict)
    """Of the expected peak; they add up to it."""
    method: str = ""
    """`trace`, `upper_bound` or `closed_form`."""
    basis: str = ""
    """Description of the count."""
    allocated_bytes: int | None = None
    """Expected highest sum of tensors: comparable with `measured.peak_allocated_bytes`, so on a CPU
    of the micro-batch that was measured."""
    verdict: str = ""
    notes: list[str] = field(default_factory=list)
    """Why the range is as wide as it is."""
    calibrated: dict[str, Any] | None = None
    """Only in records from before finished runs stopped correcting this forecast."""


@dataclass
class MemoryRecord:
    """Predicted against measured."""

    predicted: PredictedMemory | None = None
    measured: MeasuredMemory | None = None
    advice: list[str] = field(default_factory=list)
    """After running out of memory: overrides with which it should fit, the cheapest first."""


@dataclass
class Loss:
    """Nats per target (token or label)."""

    train_first: float | None = None
    train_final: float | None = None
    eval_start: float | None = None
    eval_final: float | None = None
    bits_per_byte_start: float | None = None
    """Evaluation loss in bits per byte of text; only where tokens are bytes."""
    bits_per_byte_final: float | None = None


IN_LOG = "  | "
"""Beginning of lines in a run's log that the command which started it does not repeat."""


@dataclass
class Failure:
    """Why a run did not end well."""

    phase: str
    """`build`, `data`, `forward`, `backward`, `optimizer`, `eval`, `checkpoint` or `worker`; in a
    cluster also `node` (not what was planned for) or `job` (over without a word)."""
    message: str
    traceback: str = ""
    lost_contact: bool = False
    """Only the symptom in this process: another one of the run ended or stopped answering."""


@dataclass(frozen=True)
class Best:
    """The best of a run's evaluations."""

    metric: str
    step: int
    value: float


@dataclass
class Record:
    """Self-contained: the report reads nothing else."""

    run_id: str
    name: str
    outcome: str
    """A member name of Outcome."""
    exit_code: int
    attempt: int
    """Number of the attempt that wrote this, from 0."""
    steps_done: int
    config: dict[str, Any]
    choices: dict[str, str]
    overrides: list[str]
    plan: dict[str, Any]
    """The derived part of the plan: device, batch, steps, compute, size, decisions, warnings."""
    machine: dict[str, str]
    environment: dict[str, Any]
    """Time, host, versions, git commit."""
    command: list[str]
    timing: Timing = field(default_factory=Timing)
    throughput: Throughput = field(default_factory=Throughput)
    memory: MemoryRecord = field(default_factory=MemoryRecord)
    loss: Loss = field(default_factory=Loss)
    best: Best | None = None
    """With `train.keep_best`: the evaluation that loss, metrics and classes are those of."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation: `perplexity` and `token_accuracy`; `accuracy`, `f1_macro` and
    `f1_micro`; or `mae`, `mse`, `r2`, `pearson` and `spearman`; of a mix `loss/NAME`, too."""
    classes: dict[str, Any] = field(default_factory=dict)
    """Likewise, of each class of a classifier: `names`, `precision`, `recall`, `f1`, `support`, and
    `confusion`: right classes by predicted ones, where a sample has one."""
    sources: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of each source of a mix, by name: `samples` trained, `epochs` of it, and the last
    `train_loss` and `eval_loss`."""
    effective: dict[str, Any] = field(default_factory=dict)
    """Read from the running objects, never copied from the request."""
    warnings: list[str] = field(default_factory=list)
    failure: Failure | None = None
    shared_device: bool | None = None
    """Another process used the device: no speed claim can be made. None: not looked at."""
    schema_version: int = RECORD_VERSION

    @property
    def model_step(self) -> int:
        """Step of the weights that the run leaves as its model."""
        return self.best.step if self.best else self.steps_done


RECORD_LIMIT = 1 << 20
"""Largest file that is read as a record, bytes; a record has some 20,000."""


@dataclass(frozen=True)
class RankFailure:
    """How a process other than rank 0 failed, in its own words."""

    attempt: int
    rank: int
    outcome: Outcome
    failure: Failure


@dataclass(frozen=True)
class DeadRank:
    """The process that ended first, as its parent saw it: it could not say anything itself."""

    attempt: int
    rank: int
    exit_code: int
    """Negative for a signal, as in Python's subprocess."""
    node: int = 0
    """Number of its machine."""


End = TypeVar("End", RankFailure, DeadRank)


def write_end(paths: RunPaths, end: RankFailure | DeadRank) -> None:
    """Write it atomically; a disk that takes nothing any more takes nothing here either."""
    path = paths.dead_rank(end.node) if isinstance(end, DeadRank) else paths.rank_failure(end.rank)
    with contextlib.suppress(OSError):
        write_json(path, cattrs.unstructure(end))


def _read_ends(paths: RunPaths, names: str, kind: type[End], attempt: int) -> list[End]:
    """Those of this attempt, lowest rank first; unreadable ones are skipped."""
    found = []
    for path in paths.folder.glob(names):
        with contextlib.suppress(OSError, ValueError, cattrs.BaseValidationError):
            found.append(cattrs.structure(read_json(path), kind))
    return sorted((end for end in found if end.attempt == attempt), key=lambda end: end.rank)


def read_rank_failures(paths: RunPaths, attempt: int) -> list[RankFailure]:
    """What the processes of this attempt left, lowest rank first."""
    return _read_ends(paths, "rank_*.json", RankFailure, attempt)


def read_dead_rank(paths: RunPaths, attempt: int) -> DeadRank | None:
    """The first process of this attempt to end, where it was observed.

    Of several machines, each of which has seen one, the one that a signal killed, else one that is
    not rank 0: those who are left behind fail with an ordinary exit code.
    """
    found = _read_ends(paths, "dead_rank*.json", DeadRank, attempt)
    return min(found, key=lambda dead: (dead.exit_code >= 0, dead.rank == 0), default=None)


def no_runs(
    folders: Sequence[Path], command: str, notes: Sequence[str] = (), usual: str = "runs"
) -> Problem:
    """What is said of `folders` without a run, some of which may be unreadable (`notes`).

    The fix is `eke COMMAND` with a folder of a similar name that leads to runs, or the `usual` one.
    """
    why, meant = "holds no run and no sweep that can be read", None
    if not any(folder.exists() for folder in folders):
        why = "there is no such folder"
        near = closest_path(folders[0]) if len(folders) == 1 else None
        meant = near if near is not None and _leads_to_runs(near) else None
    fix = Fix(remark=f"eke {command} {shlex.quote(str(meant)) if meant else usual}")
    return Problem("DIR", ", ".join(map(str, folders)), "; ".join([why, *notes]), fix)


def _leads_to_runs(folder: Path) -> bool:
    """Whether it is a sweep or a run, or holds one: a name that is near may be anything's."""
    marks = ("sweep.json", "plan.json", "record.json")
    return any(any(folder.glob(f"{depth}{mark}")) for depth in ("", "*/") for mark in marks)


class UnreadableRecord(EkeError):
    """A record cannot be read now, or by this version: reported, never dropped."""


class NoRecord(UnreadableRecord):
    """The file holds no record, or another run's: it never answers for this run."""


@functools.cache  # 20 ms, and a sweep reads and writes a thousand records; immutable
def _converter() -> cattrs.Converter:
    return cattrs.Converter(forbid_extra_keys=True)


_DEPTH = 100
"""Levels of a record; eke writes about ten, and every use of deeper ones needs more frames."""


def _check(value: Any, depth: int = 0) -> None:
    """Raise ValueError for what `write_record` never writes, and what any later use may fail at."""
    if depth > _DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _check(each, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number of a record")
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        raise ValueError("an integer of more than 64 bits")


def table(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A table inside a record's untyped data; empty where there is another value, or none."""
    found = data.get(key)
    return found if isinstance(found, dict) else {}


def write_record(paths: RunPaths, record: Record) -> None:
    """Write `record.json` atomically."""
    write_json(paths.record, _converter().unstructure(record))


def read_record(paths: RunPaths) -> Record | None:
    """Return the record of this run, None without one; the only reader of `record.json`.

    Raises:
        NoRecord: the file holds no record (empty, torn, a list), or the record of another run; or
            there is none, and the plan is another run's, as its checkpoints then are.
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
        raise NoRecord(f"{paths.record}: not a readable record (no object)")
    version = content.get("schema_version")
    if version != RECORD_VERSION:
        is_newer = isinstance(version, int) and version > RECORD_VERSION
        raise (UnreadableRecord if is_newer else NoRecord)(
            f"{paths.record}: record version {version}, this eke reads {RECORD_VERSION}"
        )
    try:
        _check(content)
        record = _converter().structure(content, Record)
        Outcome(record.outcome)  # a ValueError for a word that is none
    except Exception as error:  # a file of others may hold any value in any place
        why = first_line(error)
        if isinstance(error, cattrs.BaseValidationError):
            why = "; ".join(cattrs.transform_error(error))[:300]
        raise NoRecord(f"{paths.record}: not a readable record ({why})") from error
    if record.run_id != (own := named or planned or record.run_id):
        raise NoRecord(f"{paths.record}: the record of run {record.run_id}, not of {own}")
    return record


def _ids(paths: RunPaths) -> tuple[str, str]:
    """Return a folder's run id by its name and by its plan, which a renamed folder has."""
    named, planned = USUAL_NAME.fullmatch(paths.folder.name), ""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        if named is None or not paths.record.exists():
            planned = str(read_json(paths.plan, RECORD_LIMIT)["run_id"])
    return named[1] if named else "", planned


def missing_run(outcome: str, folder: Path) -> str:
    """What is said of a missing run that its sweep's file has an outcome of; else empty."""
    if not outcome or folder.exists():
        return ""
    return f"{outcome} by its sweep's file, but {folder} is not there: moved, or not copied along?"


def start_attempt(
    paths: RunPaths, machine: dict[str, str], cut: dict[str, Any] | None = None
) -> int:
    """Note that a worker starts on this run, with `cut_of` its plan.

    Returns the attempt's number, from 0.
    """
    attempt = len(read_attempts(paths))
    entry = {
        "attempt": attempt,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": time.time(),
        "machine": machine,
        "cut": cut,
    }
    seal(paths.attempts)
    append_line(paths.attempts, json.dumps(entry))
    return attempt


def cuts_of(attempts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The different cuts of the attempts, in the order in which they were first used."""
    found: list[dict[str, Any]] = []
    for each in attempts:
        if (cut := each.get("cut")) and cut not in found:
            found.append(cut)
    return found


def read_attempts(paths: RunPaths) -> list[dict[str, Any]]:
    """All attempts so far, oldest first; a torn line, and one that is no object, is skipped."""
    try:
        lines = read_text(paths.attempts, 4 * RECORD_LIMIT).splitlines()
    except OSError:
        return []
    entries = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            entries.append(json.loads(line))
    return [entry for entry in entries if isinstance(entry, dict)]
