"""The fork server as its pool sees it.

Which run may be forked, and what its server imports: functions of plans and environments.

A process that another one forked for this one; Linux.
"""

import ctypes
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from eke.common.files import open_file, own_folder
from eke.common.paths import PROCESS
from eke.common.process_env import module_command
from eke.launch.processes.worker_process import Order, Process, spawn, worker_environment
from eke.plan.planner import Plan
from eke.training.loop.fork_request import GO, LET_GO, LONGEST_WORD, READY, Request, send_request

READ_LATER = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Read by CUDA when it is first used, and the server never uses it (CUDA C++ Programming Guide,
environment variables)."""

OWN = "EKE_"
"""What eke's own variables begin with: read when they are needed."""


@dataclass(frozen=True)
class Surroundings:
    """What a process finds when it starts."""

    environment: Mapping[str, str]
    cores: frozenset[int]
    """Where it may run."""

    @staticmethod
    def here(environment: Mapping[str, str]) -> "Surroundings":
        """Of a process that this thread would start now."""
        return Surroundings(environment, frozenset(os.sched_getaffinity(0)))


def why_fresh(plan: Plan, worker: Surroundings, server: Surroundings) -> str:
    """Why a run needs a process that has imported nothing yet; empty when it may be forked.

    Whatever libraries may read while they are imported must be the server's. It is not known of
    every variable who reads it when, so that any other one counts.

    Args:
        plan: of the run.
        worker: what its process would find.
        server: what the server has found.
    """
    if plan.batch.world_size > 1:
        return f"it has {plan.batch.world_size} processes, which their agent starts"
    if plan.deepspeed is not None:
        return "DeepSpeed changes torch when it is imported"
    different = sorted(
        name
        for name in {*worker.environment, *server.environment}
        if worker.environment.get(name) != server.environment.get(name)
        and name not in READ_LATER
        and not name.startswith(OWN)
    )
    if different:
        return f"{different[0]} is not the server's, and may be read by an import"
    if worker.cores != server.cores and "OMP_NUM_THREADS" not in worker.environment:
        return "it has other cores than the server, and OpenMP counts them when it is loaded"
    return ""


def modules_of(plans: Iterable[Plan]) -> list[str]:
    """Modules that runs of a sweep need beside what all runs do: their models', and W&B's."""
    configs = [plan.config for plan in plans]
    families = sorted({config.model.family for config in configs})
    trackers = ["wandb"] if any(config.tracker.option == "wandb" for config in configs) else []
    return [f"transformers.models.{family}.modeling_{family}" for family in families] + trackers


PR_SET_CHILD_SUBREAPER = 36
"""linux/prctl.h; prctl(2): orphans among this process's descendants become its children."""


class Adopted:
    """A child that came by adoption; `subprocess.Popen`, as far as a worker needs it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._look(os.WNOHANG)

    def wait(self) -> int:
        """Its exit code, once it has one."""
        code = self._look(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _look(self, flags: int) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, flags)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@contextmanager
def adopting() -> Iterator[None]:
    """Become the parent of orphans in here; afterwards others take care of them again.

    Raises:
        OSError: the system knows no such thing.
    """
    _adopt(True)
    try:
        yield
    finally:
        _adopt(False)


def _adopt(on: bool) -> None:
    try:
        failed = ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
    except AttributeError as error:
        raise OSError("this system has no prctl") from error
    if failed:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


MODULE = "eke.training.loop.fork_server"
"""What the server runs; never imported here, where torch is not."""

IMPORT_LIMIT_S = 300.0
"""For its imports, which take seconds; minutes on a network file system."""

ANSWER_LIMIT_S = 30.0
"""For a fork, which takes hundredths of a second."""


class ForkServer:
    """One for a sweep, started when the first run is due; without it, runs get fresh processes."""

    def __init__(
        self,
        log: Path,
        modules: Sequence[str],
        say: Callable[[str], object],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            log: where it prints.
            modules: what the sweep's runs need beside what all runs do.
            say: tells the user, once, that it is gone.
            environment: what its workers have in common, and nobody else.
        """
        self._log, self._modules, self._say = log, modules, say
        self._surroundings = Surroundings.here(worker_environment(environment))
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._deadline = 0.0
        self._ready = False
        self.lost = ""
        """Why there is none any more; empty while there is, or may be."""

    @property
    def pid(self) -> int | None:
        """Of its process; None where there is none."""
        return self._process.pid if self._process else None

    def is_ready(self) -> bool:
        """Whether runs can be started, by it or without it; the first question starts it."""
        if self._ready or self.lost:
            return True
        try:
            if self._process is None:
                self._launch()
                return False
            self._ready = self._has_said_so()
        except (OSError, _Unfit) as error:
            self._lose(str(error))
        return self._ready or bool(self.lost)

    def start(self, plan: Plan, order: Order) -> Process:
        """Start a process by a fork, or afresh where that is not possible; it finds out which.

        Args:
            plan: of its run.
            order: as for a fresh process.

        Raises:
            OSError: there is no process to be had.
        """
        why = self.lost or why_fresh(plan, Surroundings.here(order.environment), self._surroundings)
        if not why:
            try:
                return self._fork(_noted(order, "forked"))
            except (OSError, _Unfit) as error:
                self._lose(str(error))
                why = self.lost
        return spawn(_noted(order, f"fresh: {why}"))

    def _launch(self) -> None:
        own_folder(self._log.parent)
        log_file = open_file(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        ours, theirs = socket.socketpair()
        with theirs, open(log_file, "ab") as log:
            self._control = ours
            self._process = subprocess.Popen(
                module_command(MODULE, str(theirs.fileno()), *self._modules),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self._surroundings.environment),
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        ours.setblocking(False)
        self._deadline = time.monotonic() + IMPORT_LIMIT_S

    def _has_said_so(self) -> bool:
        assert self._control is not None
        try:
            said = self._control.recv(LONGEST_WORD).decode(errors="replace")
        except BlockingIOError:
            if time.monotonic() > self._deadline:
                raise _Unfit(f"its imports take longer than {IMPORT_LIMIT_S:.0f} s") from None
            return False
        if said != READY:
            raise _Unfit(said or f"it ended before it was ready, see {self._log}")
        self._control.settimeout(ANSWER_LIMIT_S)
        return True

    def _fork(self, order: Order) -> Process:
        """Have a worker forked; it starts once this process knows that it is its child.

        The worker alone has the other end of the line: whatever goes wrong there ends it.
        """
        assert self._control is not None
        module, *arguments = order.command[list(order.command).index("-m") + 1 :]
        request = Request(
            module,
            arguments,
            dict(order.environment),
            os.getcwd(),
            sorted(os.sched_getaffinity(0)),
        )
        ours, theirs = socket.socketpair()
        ours.settimeout(ANSWER_LIMIT_S)
        with ours, adopting():
            with theirs:
                send_request(
                    self._control, request, [theirs.fileno(), order.log, *order.descriptors]
                )
            said = ours.recv(LONGEST_WORD)
            if not said:
                raise _Unfit(f"it is gone, or could not fork, see {self._log}")
            child = Adopted(int(said))
            self._control.recv(len(LET_GO))  # or it is gone, and its copies with it
            ours.sendall(GO)
        return child

    def _lose(self, why: str) -> None:
        self.lost = f"the fork server is lost: {why}"
        self.close()
        self._say(f"{self.lost}; runs get fresh processes")

    def close(self) -> None:
        """End it; what it has forked goes on."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class _Unfit(Exception):
    """The server cannot be used, and why."""


def _noted(order: Order, how: str) -> Order:
    """The same, with a word on what kind of process it is."""
    return replace(order, environment={**order.environment, PROCESS: how})
