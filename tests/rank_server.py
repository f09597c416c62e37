"""Ranks that are forked from one process with everything imported, instead of started afresh.

A fresh rank imports torch, transformers and eke for ten seconds to train for one. The server
imports once and computes nothing, so that no thread stands in the way of a fork; each rank is the
process that torchrun would have started: its own environment, output, signals and exit code.
`python train.py` and torch's agent are what tests/e2e/test_ranks.py is for.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eke.common.paths import AGENT, LOCAL_RANK, RANK, WORLD_SIZE, RunPaths
from eke.plan.planner import Plan
from eke.training.loop.environment import QUIET, quiet_imports
from eke.training.loop.stop import end_with_parent
from eke.training.model import import_transformers

MODULES = (
    "accelerate",
    "eke.training.loop.attempt",
    "numpy.random",
    *(f"transformers.models.{m}.modeling_{m}" for m in ("bert", "gpt2", "llama", "mixtral", "t5")),
)
"""What every rank needs, or one of the tests' models does."""

GRACE_S = 10.0
"""Between asking the others to stop, once a rank has failed, and killing them."""

POLL_S = 0.01


def modules_of(plan: Plan) -> list[str]:
    """What ranks with this plan need besides; DeepSpeed, above all, is not for the others."""
    config = plan.config
    needed = {
        # Accelerate imports it wherever the Trainer saves, and it brings mlflow.
        "deepspeed": plan.deepspeed is not None or config.engine.option == "trainer",
        "peft": config.peft.option != "none",
        "torch.export._trace": config.compile.option != "none",  # the most of what dynamo imports
        "transformers.trainer": config.engine.option == "trainer",
    }
    return [module for module, wanted in needed.items() if wanted]


class RankServer:
    """The server as a test sees it; the first request starts it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "server.log"
        self.process: subprocess.Popen[str] | None = None

    def train(
        self,
        paths: RunPaths,
        num_processes: int,
        environment: Mapping[str, str],
        *,
        modules: Sequence[str] = (),
        timeout: float = 300.0,
    ) -> list[int]:
        """Train what lies in a run folder; returns the ranks' exit codes, negative for a signal.

        Args:
            paths: the run folder, with its plan.
            num_processes: ranks.
            environment: of each rank, but for what torchrun sets.
            modules: to be imported before the ranks are forked, for this request and later ones.
            timeout: seconds after which the ranks are killed.
        """
        request = {
            "folder": str(paths.folder),
            "num_processes": num_processes,
            "environment": dict(environment),
            "modules": list(modules),
            "timeout": timeout,
        }
        try:
            process = self.process = self.process or self._start(environment)
            assert process.stdin
            assert process.stdout
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
            if not reply:
                raise RuntimeError(f"the rank server is gone:\n{self.log.read_text()[-4000:]}")
            codes: list[int] = json.loads(reply)
            return codes
        except BaseException:  # a test's time limit, too: its answer is not the next one's
            self.close()
            raise

    def _start(self, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, __file__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**environment, **QUIET, "DS_ACCELERATOR": "cpu"},
                start_new_session=True,
            )

    def close(self) -> None:
        """End the server, and with it whatever it has started."""
        if self.process is None:
            return
        process, self.process = self.process, None
        process.kill()  # the kernel then ends the ranks
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe
            pipe.close()


def serve(parent: int) -> None:
    """Answer requests until nobody asks any more."""
    end_with_parent(signal.SIGKILL, str(parent))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    load()
    for line in sys.stdin:
        codes = run_ranks(json.loads(line))
        replies.write(json.dumps(codes) + "\n")
        replies.flush()


def load() -> None:
    """Import what every rank needs, as a worker does: without what transformers would add."""
    quiet_imports()
    import_transformers()
    for module in MODULES:
        importlib.import_module(module)


def run_ranks(request: Mapping[str, Any]) -> list[int]:
    """Fork the ranks, and wait for their end as torch's agent does."""
    for module in request["modules"]:
        importlib.import_module(module)
        if module == "deepspeed":
            read_processor()
    gc.collect()
    gc.freeze()  # so that the ranks' collections leave the shared pages alone
    store, port = fork_store()
    ranks = []
    try:
        for rank in range(request["num_processes"]):
            ranks.append(fork(lambda rank=rank: be_rank(rank, port, request)))
        return wait_for(ranks, time.monotonic() + request["timeout"])
    finally:
        for pid in (*ranks, store):
            end(pid)


@functools.cache
def read_processor() -> None:
    """Read it for DeepSpeed: each rank would start a process, and spin for a second."""
    from eke.training.distributed.build_operators import read_processor_once

    read_processor_once()
    importlib.import_module("cpuinfo").get_cpu_info()


def fork(work: Any) -> int:
    """A child in a process group of its own that does this and nothing else."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        end_with_parent(signal.SIGKILL, str(server))
        code = work()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fork_store() -> tuple[int, int]:
    """A process with the store where ranks meet, as torch's agent has one, and its port.

    Its port is free since it chose it; its threads are none of the server's.
    """
    reading, writing = os.pipe()

    def hold() -> int:
        from torch.distributed import TCPStore

        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        os.write(writing, f"{store.port}\n".encode())
        while True:
            signal.pause()

    pid = fork(hold)
    os.close(writing)
    with os.fdopen(reading) as told:
        return pid, int(told.readline())


def be_rank(rank: int, port: int, request: Mapping[str, Any]) -> int:
    """Train as `python -m eke.training.loop.worker FOLDER`: under torchrun, if several."""
    paths, world = RunPaths(Path(request["folder"])), str(request["num_processes"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ[AGENT] = str(os.getppid())
    if request["num_processes"] > 1:
        own = {RANK: rank, LOCAL_RANK: rank, "GROUP_RANK": 0, "ROLE_RANK": rank}
        shared = dict.fromkeys((WORLD_SIZE, "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), world)
        os.environ.update({name: str(value) for name, value in own.items()} | shared)
        os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
        os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "True"})
        os.environ.update({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"})
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(paths.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.chdir(paths.folder.parent)
    sys.argv = ["eke.training.loop.worker", str(paths.folder)]
    differ_by_chance()
    from eke.training.loop.worker import main

    return main([str(paths.folder)])


def differ_by_chance() -> None:
    """Processes that were started apart have other random numbers until they are seeded."""
    import numpy.random

    random.seed()
    numpy.random.seed()


def wait_for(ranks: Sequence[int], deadline: float) -> list[int]:
    """Exit codes in the order of ranks; once one has failed, the others are asked to stop."""
    codes: dict[int, int] = {}
    asked = False
    while len(codes) < len(ranks):
        time.sleep(POLL_S)
        for pid in (pid for pid in ranks if pid not in codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        left = [pid for pid in ranks if pid not in codes]
        if any(codes.values()) and not asked:
            asked, deadline = True, min(deadline, time.monotonic() + GRACE_S)
            for pid in left:
                os.kill(pid, signal.SIGTERM)
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    return [codes[pid] for pid in ranks]


def end(pid: int) -> None:
    """Whatever a child has started (loader processes) ends with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # it was waited for already
        os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: no rank has it
    serve(int(sys.argv[1]))
