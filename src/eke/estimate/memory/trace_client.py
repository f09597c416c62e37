"""Client for traces: cached ones, and new ones from processes that import torch.

A tracing process serves many plans. If it ends or takes too long, its current plan has no trace,
and another process takes the next plan. Traces are cached on disk by all their inputs.
"""

import atexit
import contextlib
import hashlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import cattrs

from eke.common.files import make_private_dir, read_json, write_atomic
from eke.common.plugins import TRACE_WORKER
from eke.common.process_env import child_environment, module_command
from eke.config.parts import OWN as OWN_GROUPS
from eke.config.schema import ENTRIES, Config
from eke.config.schema.codec import make_converter
from eke.data.sources import cache_folder
from eke.estimate.memory.components import Traced
from eke.hardware import usable_cores
from eke.hardware.fingerprint import LIBRARIES, installed_versions, package_folder, source_hash
from eke.models.sizes import is_ragged
from eke.plan.identity import PRESENTATION, PRESENTATION_KEYS, canonical
from eke.plan.own_code import Code, OwnFacts
from eke.plan.planner import PLACES, Plan, evaluated, simulated_micro_batches
from eke.plan.planner.plan import plan_to_plain

_T = TypeVar("_T")

_FORMAT = 4
"""Version of the cached content, increased when its meaning changes."""

SOURCES = ("config/schema", "models", "plan", "training")
"""Packages of eke that affect a trace."""

_NO_MEMORY: Mapping[str, tuple[str, ...] | None] = {
    **dict.fromkeys(PRESENTATION),
    "seed": None,
    "repeat": None,
    "schedule": None,
    "dataloader": None,
    "engine": None,
    "batch": None,  # included as planned, and by the rows
    "train": (
        *PRESENTATION_KEYS["train"], "steps", "epochs", "eval_every", "timing_warmup_steps",
        "stop_on_nonfinite",
    ),
    "optimizer": (
        "lr", "weight_decay", "beta1", "beta2", "eps", "eps1", "clip_threshold", "decay_rate",
        "adamw_lr", "average_power", "lr_power", "scale",
    ),
    "data": (
        *PLACES, "data_seed", "num_samples", "num_eval_samples", "eval_frac", "min_token",
        "max_token", "max_row_bytes", "seq_len", "lengths", "min_len", "median_len", "sigma",
        "length_grouping", "sources",
    ),
    "distributed": ("timeout_s", "p2p"),
    "peft": ("alpha",),
    "precision": ("tf32",),
}  # fmt: skip
"""Keys without an effect on traces, None for an entire group. New keys count as relevant."""


def trace_key(plan: Plan) -> str:
    """Return 32 hex digits, equal for plans with the same trace."""
    return digest_of(memory_fingerprint(plan))


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the hash of JSON values as 32 hex digits."""
    return hashlib.sha256(canonical(content).encode()).hexdigest()[:32]


def memory_fingerprint(plan: Plan) -> dict[str, Any]:
    """Return the parts of a plan that affect its memory, as JSON values."""
    plain, config = plan_to_plain(plan), {}
    for group, value in plain["config"].items():
        left_out = _NO_MEMORY.get(group, ())
        if left_out is not None:
            if isinstance(value, dict):
                value = {key: part for key, part in value.items() if key not in left_out}
            config[group] = value
    return {
        "format": _FORMAT,
        "config": config,
        "engine": plan.config.engine.option,
        "batch": {**plain["batch"], "per_device": None, "eval_per_device": None},
        "rows": [
            astuple(each) for each in (simulated_micro_batches(plan).expected, evaluated(plan))
        ],
        "ragged": is_ragged(plan.config),
        "compute": {**plain["compute"], "tf32": None, "pin_memory": None},
        "device": _device(plan),
        "deepspeed": plain["deepspeed"] is not None,
        "code": plan.code.digest if plan.code else "",
        "software": software(SOURCES),
    }


def _device(plan: Plan) -> list[Any]:
    """Return a GPU's generation, or a CPU's properties that affect its kernels' scratch memory."""
    device = plan.device
    if device.kind != "cpu":
        return [device.kind, device.capability]
    return [device.kind, device.name, usable_cores(), os.environ.get("OMP_NUM_THREADS", "")]


@cache
def software(packages: tuple[str, ...]) -> dict[str, str]:
    """Return hashes of packages of eke, and versions of libraries."""
    folder = package_folder()
    hashes = {name: source_hash(folder / name) for name in packages}
    return {**hashes, **installed_versions(LIBRARIES)}


def find_trace(key: str) -> Traced | None:
    """Return the cached trace of a key, None if missing or unreadable."""
    return read_kept("traces", key, Traced)


def keep_trace(key: str, traced: Traced) -> None:
    """Store a trace, if possible."""
    store_trace_result("traces", key, traced)


def read_kept(folder: str, key: str, kind: type[_T]) -> _T | None:
    """Return the value of a key in a folder of the cache, None if missing or unreadable."""
    try:
        return make_converter().structure(read_json(_path(folder, key)), kind)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, cattrs.BaseValidationError):
        return None


def store_trace_result(folder: str, key: str, value: Any) -> None:
    """Store a value, if possible. Otherwise it is computed again next time."""
    path = _path(folder, key)
    with contextlib.suppress(OSError):
        make_private_dir(path.parent)
        write_atomic(path, json.dumps(make_converter().unstructure(value)))  # phases in order


def _path(folder: str, key: str) -> Path:
    return cache_folder() / folder / f"{key}.json"


_LIMIT_S = 120.0
"""CPU seconds for one plan, including imports. The limit of elapsed time is ten times as long."""

MODULE = TRACE_WORKER


@dataclass(frozen=True)
class TraceResult:
    """A trace, or the reason for its absence."""

    traced: Traced | None
    reason: str = ""
    """Reason in one line. Empty with a trace."""


class _NoAnswer(Exception):
    """The tracing process ended or took too long."""


class TraceProcess:
    """One tracing process, started at the first request."""

    def __init__(self, module: str = MODULE) -> None:
        self._module = module
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._listener: threading.Thread | None = None
        self._lock = threading.Lock()

    def ask(self, plan: Plan, limit_s: float | None = None) -> TraceResult:
        """Return the trace of a plan, or how the process failed."""
        try:
            return _read(self.request(plan_to_plain(plan), limit_s))
        except _NoAnswer as error:
            return TraceResult(None, str(error))

    def request(self, content: Mapping[str, Any], limit_s: float | None = None) -> str:
        """Return the line that answers a request. _NoAnswer: how the process failed."""
        with self._lock:
            process = self._process or self._start()
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps(content) + "\n")
                process.stdin.flush()
                line = self._next_line(process.pid, limit_s or _LIMIT_S)
            except TimeoutError as error:
                self._stop()
                raise _NoAnswer(f"the trace took longer than {error}") from error
            except OSError:
                line = ""
            except BaseException:  # Ctrl-C: the pending answer is discarded
                self._stop()
                raise
            if not line:
                raise _NoAnswer(f"the tracing process {self._stop()}")
            return line

    def _next_line(self, pid: int, limit_s: float) -> str:
        """Return the next line of output. Raise TimeoutError with the exceeded limit."""
        start_s, start_cpu_s = time.monotonic(), _processor_s(pid)
        while True:
            with contextlib.suppress(queue.Empty):
                return self._lines.get(timeout=min(1.0, limit_s))
            if _processor_s(pid) - start_cpu_s > limit_s:
                raise TimeoutError(f"{limit_s:.0f} s of CPU time")
            if time.monotonic() - start_s > 10 * limit_s:
                raise TimeoutError(f"{10 * limit_s:.0f} s")

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._stop()

    def _start(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            module_command(self._module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            text=True,
            encoding="utf-8",
        )
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()

        def listen() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put("")

        self._listener = threading.Thread(target=listen, daemon=True)
        self._listener.start()
        self._process, self._lines = process, lines
        return process

    def _stop(self) -> str:
        process, self._process = self._process, None
        if process is None:
            return "was not running"
        ended = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = process.wait(0.5)
        if ended is None:
            process.kill()
        if self._listener is not None:
            self._listener.join()
        with contextlib.suppress(OSError), process:  # input that was not read
            pass
        if ended is None:
            return "was stopped"
        return f"was ended by signal {-ended}" if ended < 0 else f"ended with code {ended}"


def _processor_s(pid: int) -> float:
    """Return the CPU seconds of a process and its ended children, 0 if unknown."""
    with contextlib.suppress(OSError):  # proc(5): utime to cstime, the 14th to 17th after (command)
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _read(line: str) -> TraceResult:
    try:
        found = json.loads(line)
        if "traced" in found:
            return TraceResult(make_converter().structure(found["traced"], Traced))
        return TraceResult(None, str(found["reason"]))
    except Exception as error:  # output of a broken process, unreadable in any way
        return TraceResult(
            None, f"the tracing process's answer is invalid ({type(error).__name__})"
        )


_worker = TraceProcess()
atexit.register(_worker.close)


def stop_tracing() -> None:
    """End the tracing process, if there is one, to free its memory for a run."""
    _worker.close()


def examine_own_code(config: Config, code: Code, files: str) -> OwnFacts:
    """Return what the tracing process finds about own code, from the cache or found now.

    `files` is a hash of the files that the code reads.
    """
    asked = {"config": make_converter().unstructure(config), "code": asdict(code)}
    parts = {group: asked["config"][group] for group in (*OWN_GROUPS, *ENTRIES)}
    content = {"parts": parts, "code": code.digest, "files": files, "seed": config.seed}
    key = digest_of({**content, "software": software(SOURCES)})
    if (found := read_kept("own_code_facts", key, OwnFacts)) is not None:
        return found
    try:
        answer = json.loads(_worker.request(asked))
    except _NoAnswer as error:
        return OwnFacts(failure=str(error).replace("trace", "examination"))
    found = make_converter().structure(answer, OwnFacts)
    store_trace_result("own_code_facts", key, found)
    return found


def get_or_run_trace(plan: Plan) -> TraceResult:
    """Return the trace of a plan, from the cache or made now."""
    return _answer(plan, trace_key(plan), _worker)


def trace_all(
    plans: Sequence[Plan],
    progress: Callable[[int, int], Any] = lambda done, total: None,
    processes: int = 1,
) -> list[TraceResult]:
    """Return the trace of each plan. `progress` receives plans done and total, from any thread."""
    keys = [trace_key(plan) for plan in plans]
    answers: dict[str, TraceResult] = {}
    for key in dict.fromkeys(keys):
        if (found := find_trace(key)) is not None:
            answers[key] = TraceResult(found)
    progress(sum(key in answers for key in keys), len(keys))
    # Plans with one key share a trace.
    missing = {key: plan for key, plan in zip(keys, plans, strict=True) if key not in answers}
    if missing:
        workers: queue.SimpleQueue[TraceProcess] = queue.SimpleQueue()
        every = [TraceProcess() for _ in range(min(processes, len(missing)))]
        for worker in every:
            workers.put(worker)

        def work(key: str) -> None:
            worker = workers.get()
            try:
                answers[key] = _answer(missing[key], key, worker)
            finally:
                workers.put(worker)
            progress(sum(each in answers for each in keys), len(keys))

        try:
            with ThreadPoolExecutor(len(every)) as pool:
                list(pool.map(work, missing))
        finally:
            for worker in every:
                worker.close()
    return [answers[key] for key in keys]


def _answer(plan: Plan, key: str, worker: TraceProcess) -> TraceResult:
    found = find_trace(key)
    if found is not None:
        return TraceResult(found)
    answer = worker.ask(plan)
    if answer.traced is not None:
        keep_trace(key, answer.traced)
    return answer
