"""State of a sweep's runs: outcomes, runs that are skipped, and requests to rerun all.

A run is skipped if it needs at least as much memory as a run that ran out of memory: the same run
with a larger micro-batch, longer samples, more layers, without checkpointing, or with float32
instead of 16-bit weights. Runs that differ in anything else cannot be compared.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError, EkeError
from eke.common.files import make_private_dir, open_file, read_json, write_json
from eke.common.paths import RunPaths, SweepPaths
from eke.common.text import format_number
from eke.config.schema import Checkpointing
from eke.launch.processes.progress_table import ProgressTable
from eke.launch.processes.run_dir import RunFolder, find_place, folder_names
from eke.launch.processes.sweep import CHANGED, Job, SweepFile
from eke.plan.planner import Plan
from eke.plan.record import Outcome, Record, read_record

_MEMORY_MONOTONIC_KEYS = (
    "batch.per_device",
    "data.seq_len",
    "model.num_hidden_layers",
    "model.vocab_size",
)
"""Keys whose larger values never need less memory."""

_MEMORY_NEUTRAL_KEYS = (
    "seed",
    "repeat",
    "optimizer.lr",
    "optimizer.weight_decay",
    "train.steps",
    "train.epochs",
)
"""Keys without an effect on memory."""


def smallest_first(jobs: Sequence[Job], risk: Callable[[Plan], int | None]) -> list[Job]:
    """Sort the first round's jobs by `risk`. Jobs whose risk is None keep their places."""
    first = min((job.plan.config.repeat for job in jobs), default=0)
    found = {
        place: size
        for place, job in enumerate(jobs)
        if job.plan.config.repeat == first and (size := risk(job.plan)) is not None
    }
    ordered = list(jobs)
    for place, taken in zip(found, sorted(found, key=lambda place: found[place]), strict=True):
        ordered[place] = jobs[taken]
    return ordered


def needs_at_least(plan: Plan, failed: Plan) -> str:
    """Return why a plan needs no less memory than one that ran out of it, "" if unknown."""
    if plan.device != failed.device or plan.batch.world_size != failed.batch.world_size:
        return ""
    if plan.batch.accumulation == 1 < failed.batch.accumulation:
        return ""  # the failed run's second micro-batch coexists with gradients
    widened = _is_wider(plan, failed)
    here, there = _flat(plan), _flat(failed)
    differing = [key for key in {*here, *there} if here.get(key) != there.get(key)]
    more = []
    for key in sorted(differing):
        if key in _MEMORY_NEUTRAL_KEYS or (widened and key.startswith("precision.")):
            continue
        old, new = there.get(key), here.get(key)
        grows = (key, old, new) == ("memory.checkpointing", Checkpointing.full, Checkpointing.off)
        if key in _MEMORY_MONOTONIC_KEYS:
            grows = isinstance(new, int) and isinstance(old, int) and new > old
        if not grows:
            return ""
        more.append(f"{key}={new} needs no less than {old}")
    more += [f"float32 needs no less than {failed.compute.weights}"] if widened else []
    return "; ".join(more) or "all settings that affect memory are equal"


def _is_wider(plan: Plan, failed: Plan) -> bool:
    """Return whether all 16-bit parts of the failed run have 32 bits in the other."""
    narrow, wide = failed.compute, plan.compute
    was_narrow = narrow.weights != "float32" and not narrow.master and narrow.float8 == "off"
    return was_narrow and (wide.weights, wide.autocast, wide.float8) == ("float32", None, "off")


def _flat(plan: Plan) -> dict[str, Any]:
    """Return the resolved value by key, without keys of the run's surroundings."""
    pairs = [pair for pair in _flatten(plan.config) if not pair[0].startswith(_AROUND)]
    found = {key: value for key, value in pairs if not key.endswith(".option")}
    found["batch.per_device"] = plan.batch.per_device
    found["model"] = type(plan.config.model).__name__
    return found


_AROUND = (
    "tracker.", "paths.", "hardware.", "rerun", "plan_only", "ignore_forecast", "launcher.",
    "train.log_every", "batch.accumulation", "batch.target", "batch.eval_per_device",
)  # fmt: skip
"""Prefixes of keys that do not affect memory or are compared as resolved."""


def _flatten(node: Any, path: str = "") -> list[tuple[str, Any]]:
    if not dataclasses.is_dataclass(node):
        return [(path.removesuffix("."), node)]
    names = [field.name for field in dataclasses.fields(node)]
    return [pair for n in names for pair in _flatten(getattr(node, n), f"{path}{n}.")]


@dataclass
class SweepState:
    """All runs of a sweep, with any launcher."""

    jobs: Sequence[Job]
    board: ProgressTable
    ledger: SweepFile
    place_of: Callable[[Plan], RunFolder] = find_place

    def running(self) -> list[Job]:
        """Return the jobs with a worker."""
        return [job for job in self.jobs if job.live is not None]

    def unfinished(self) -> list[Job]:
        """Return the jobs without an outcome."""
        return [job for job in self.jobs if job.outcome is None]

    def answer_from_records(self) -> None:
        """Settle the jobs with a final record. Print once why records are not reused."""
        places: list[RunFolder] = []
        for job in self.jobs:
            try:
                place = self.place_of(job.plan)
                self.answer(job, place)
            except EkeError as error:
                self.fail(job, error)
            else:
                places.append(place)
        for text in rerun_reasons(places):
            self.board.note(text)

    def answer(self, job: Job, place: RunFolder) -> bool:
        """Settle a job from a final record, if there is one. Return whether there is."""
        job.folder = str(place.paths.folder)
        if place.record is None:
            return False
        job.reused = job.live is None and not job.tries
        job.record = place.record
        failure = place.record.failure
        self.end(job, Outcome[place.record.outcome], failure.message if failure else "")
        return True

    def started(self, job: Job) -> None:
        """Mark a job as started."""
        job.started, job.waiting_for = time.monotonic(), ""
        self.board.started(job)
        self.ledger.note(job)

    def settle(self, job: Job, record: Record, stopping: bool = False) -> None:
        """Take the record of an ended attempt. The job is tried again unless it has an outcome."""
        again = job.settle(record) and not stopping
        if stopping and job.outcome is None:
            job.end(Outcome[record.outcome], record.failure.message if record.failure else "")
        if not again:
            self.skip_what_needs_more(job)

    def left(self, job: Job) -> None:
        """Mark a settled job as having no worker."""
        job.live = None
        job.lasted_s += time.monotonic() - job.started
        self.board.ended(job)
        self.ledger.note(job)

    def fail(self, job: Job, error: EkeError) -> None:
        """Settle a job that cannot start now."""
        rule = error.rule if isinstance(error, ConfigError) else ""
        self.end(job, Outcome.crashed, error.short(), rule)

    def end(self, job: Job, outcome: Outcome, reason: str, rule: str = "") -> None:
        """Settle a job that has no worker."""
        job.end(outcome, reason, rule)
        self.skip_what_needs_more(job)
        self.board.ended(job)
        self.ledger.note(job)

    def skip_what_needs_more(self, job: Job) -> None:
        """Skip the jobs that need at least as much memory as a job that ran out of it."""
        # On a shared device, the other runs may have used the memory.
        if job.outcome is not Outcome.oom or (job.record and job.record.shared_device):
            return
        for other in self.jobs:
            if other.is_waiting() and (why := needs_at_least(other.plan, job.plan)):
                self.end(other, Outcome.skipped, f"{job.plan.run_id} ran out of memory, {why}")


def rerun_reasons(places: Sequence[RunFolder]) -> list[str]:
    """Return a line for each reason why finished runs are repeated."""
    reasons = Counter("; ".join(place.outdated) for place in places if place.outdated)
    return [
        f"repeated in a new folder: {format_number(count, 'run')} ({what}). eke report shows both"
        for what, count in reasons.items()
    ]


class Rerun:
    """One request to rerun a sweep, shared by commands before its completion."""

    def __init__(self, paths: SweepPaths, jobs: Sequence[Job]) -> None:
        self.paths, self.jobs = paths, [job for job in jobs if job.plan.config.rerun]
        self.goes_on = False
        """True if an earlier command began the request."""
        self._state: dict[str, Any] = {}
        if not self.jobs:
            return
        with self._hold_lock():
            runs = paths.folder.parent
            known = self._read()
            met = known.get("met")
            if known and (met is None or not all(has_final_record(runs / name) for name in met)):
                self._state, self.goes_on = {**known, "met": None}, True
            else:
                self._state = {"begun": uuid.uuid4().hex, "old": {}, "met": None}
            old = self._state["old"]
            for run_id in (job.plan.run_id for job in self.jobs):
                there = itertools.takewhile(lambda n: (runs / n).exists(), folder_names(run_id))
                names = old.get(run_id, there)
                old[run_id] = [name for name in names if has_final_record(runs / name)]
            self._write()

    @property
    def old(self) -> set[str]:
        """Names of folders whose final records precede the request."""
        return {name for names in self._state.get("old", {}).values() for name in names}

    def end(self) -> None:
        """Mark the request as complete once all runs have ended. Later commands begin another."""
        ends = [job.outcome for job in self.jobs if job.rule != CHANGED]
        never = (Outcome.skipped, Outcome.refused)
        if not ends or len(ends) < len(self.jobs):
            return
        if not all(outcome and (outcome.is_final or outcome in never) for outcome in ends):
            return
        with self._hold_lock():
            if self._read().get("begun") == self._state["begun"]:
                done = [job for job in self.jobs if job.outcome and job.outcome.is_final]
                self._state["met"] = [Path(job.folder).name for job in done]
                self._write()

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(read_json(self.paths.rerun))
        return {}

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: it holds for this command only
            write_json(self.paths.rerun, self._state)

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Hold exclusive access to the file if the file system has locks."""
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):
                make_private_dir(self.paths.folder)
                lock = self.paths.rerun.with_suffix(".lock")
                descriptor = open_file(lock, os.O_RDWR | os.O_CREAT)
                held.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield


def has_final_record(folder: Path) -> bool:
    """Return whether a run's folder has a readable final record."""
    try:
        record = read_record(RunPaths(folder))
        return record is not None and Outcome[record.outcome].is_final
    except EkeError:
        return False
