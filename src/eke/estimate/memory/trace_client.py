"""Asking for traces: kept ones at once, others of processes that import torch.

A tracing process answers many plans. If it dies or takes too long, that is the answer for the plan
it was at, and another process takes the next one.
"""

import atexit
import contextlib
import json
import queue
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from eke.common.process_env import child_environment, module_command
from eke.config.schema.codec import make_converter
from eke.estimate.memory import cache
from eke.estimate.memory.values import Traced
from eke.plan.planner import Plan
from eke.plan.planner.store import plan_to_plain

LIMIT_S = 120.0
"""For one plan, the imports of a new process included: many times what the largest models take."""

MODULE = "eke.training.trace.worker"
"""What a tracing process runs."""


@dataclass(frozen=True)
class Answer:
    """A trace, or why there is none."""

    traced: Traced | None
    reason: str = ""
    """In one line; empty where there is a trace."""


class Worker:
    """One tracing process, started when it is first asked."""

    def __init__(self, module: str = MODULE) -> None:
        self._module = module
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._listener: threading.Thread | None = None
        self._lock = threading.Lock()

    def ask(self, plan: Plan, limit_s: float = LIMIT_S) -> Answer:
        """What the process finds, or what became of it."""
        with self._lock:
            process = self._process or self._start()
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps(plan_to_plain(plan)) + "\n")
                process.stdin.flush()
                line = self._lines.get(timeout=limit_s)
            except queue.Empty:
                self._stop()
                return Answer(None, f"the trace took longer than {limit_s:.0f} s")
            except OSError:
                line = ""
            except BaseException:  # Ctrl-C: the answer that is under way is nobody's
                self._stop()
                raise
            if not line:
                return Answer(None, f"the tracing process {self._stop()}")
            return _read(line)

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
        self._listener = threading.Thread(target=_listen, args=(process, lines), daemon=True)
        self._listener.start()
        self._process, self._lines = process, lines
        return process

    def _stop(self) -> str:
        """End the process; says how it ended."""
        process, self._process = self._process, None
        if process is None:
            return "was not there"
        ended = process.poll()
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = process.wait(0.5) if ended is None else ended
        if ended is None:
            process.kill()
            process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):  # what it did not read any more
                process.stdin.close()
        if self._listener is not None:
            self._listener.join()
        if process.stdout is not None:
            process.stdout.close()
        if ended is None:
            return "was stopped"
        return f"was ended by signal {-ended}" if ended < 0 else f"ended with code {ended}"


def _listen(process: "subprocess.Popen[str]", lines: "queue.SimpleQueue[str]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def _read(line: str) -> Answer:
    try:
        found = json.loads(line)
        if "traced" in found:
            return Answer(make_converter().structure(found["traced"], Traced))
        return Answer(None, str(found["reason"]))
    except Exception as error:  # whatever a broken process wrote, in whatever way it is unreadable
        return Answer(None, f"the tracing process answered nonsense ({type(error).__name__})")


_worker = Worker()
atexit.register(_worker.close)


def stop_tracing() -> None:
    """End the tracing process, if there is one: a run that starts needs its memory."""
    _worker.close()


def traced(plan: Plan, limit_s: float = LIMIT_S) -> Answer:
    """The trace of a plan, from the cache or made now.

    Args:
        plan: the run.
        limit_s: seconds after which there is no answer.
    """
    return _answer(plan, cache.key_of(plan), _worker, limit_s)


def trace_all(
    plans: Sequence[Plan],
    progress: Callable[[int, int], Any] | None = None,
    processes: int = 1,
    limit_s: float = LIMIT_S,
) -> list[Answer]:
    """The trace of each plan; those that one trace answers share it.

    Args:
        plans: of a sweep, for example.
        progress: told how many plans of how many have their answer; called from any thread.
        processes: at most so many at once.
        limit_s: seconds for one plan.
    """
    keys = [cache.key_of(plan) for plan in plans]
    answers: dict[str, Answer] = {}
    for key in dict.fromkeys(keys):
        if (found := cache.find(key)) is not None:
            answers[key] = Answer(found)
    report = progress or (lambda done, total: None)
    report(sum(key in answers for key in keys), len(keys))
    missing = {key: plan for key, plan in zip(keys, plans, strict=True) if key not in answers}
    if missing:
        workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        every = [Worker() for _ in range(min(processes, len(missing)))]
        for worker in every:
            workers.put(worker)

        def work(key: str) -> None:
            worker = workers.get()
            try:
                answers[key] = _answer(missing[key], key, worker, limit_s)
            finally:
                workers.put(worker)
            report(sum(each in answers for each in keys), len(keys))

        try:
            with ThreadPoolExecutor(len(every)) as pool:
                list(pool.map(work, missing))
        finally:
            for worker in every:
                worker.close()
    return [answers[key] for key in keys]


def _answer(plan: Plan, key: str, worker: Worker, limit_s: float) -> Answer:
    found = cache.find(key)
    if found is not None:
        return Answer(found)
    answer = worker.ask(plan, limit_s)
    if answer.traced is not None:
        cache.keep(key, answer.traced)
    return answer
