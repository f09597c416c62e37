"""`python -m eke.training.loop.fork_server`: imports what workers need, once, and forks them.

It computes nothing and touches no GPU, so that there are no threads and no context that a fork
would break; it waits for requests on a socket and ends with the pool that started it. What it forks
is no child of its own but the pool's (`fork_child`): when it is killed, no run notices.

From a fork of the server to the process that the pool would have started afresh.
"""

import gc
import importlib
import os
import random
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from eke.common.paths import SUPERVISOR
from eke.common.streams import open_streams
from eke.training.loop.fork_request import GO, LET_GO, LONGEST_WORD, READY, Request, receive_request
from eke.training.loop.stop import end_with_parent

ADOPTION_S = 5.0
"""Until the kernel has given an orphan to the pool; microseconds."""

ADOPTION_POLL_S = 0.0005


def orphan(work: Callable[[], NoReturn]) -> None:
    """Fork a process that does this, and whose parent is gone.

    Raises:
        OSError: there is no process to be had.
    """
    middle = os.fork()
    if middle == 0:
        try:
            if os.fork() == 0:
                work()
        finally:  # whatever happens, neither of them goes on as a server
            os._exit(1)
    os.waitpid(middle, 0)


def become(request: Request, descriptors: Sequence[int], control: socket.socket) -> NoReturn:
    """Be what was asked for, once the pool says so; never comes back.

    Args:
        request: what to do.
        descriptors: the line to the pool, the log, and locks that are held by being open.
        control: the server's own socket, which the pool must see closed when the server dies.
    """
    try:
        control.close()
        line, log, *_ = descriptors  # the rest are locks, held and handed on by being open
        os.setsid()
        take_environment(request.environment)
        os.chdir(request.directory)
        os.sched_setaffinity(0, request.cores)
        redirect(log)
        if not (wait_for_adoption() and report(line)):
            os._exit(1)
        differ_by_chance()
        code = run_module(request)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def take_environment(environment: dict[str, str]) -> None:
    """Have exactly these variables, for native code too."""
    os.environ.clear()
    os.environ.update(environment)


def redirect(log: int) -> None:
    """Read nothing, and print into the log."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(nothing)
    os.close(log)


def wait_for_adoption() -> bool:
    """Whether the pool is this process's parent now, as it is that of a fresh one."""
    deadline = time.monotonic() + ADOPTION_S
    while str(os.getppid()) != os.environ[SUPERVISOR]:
        if time.monotonic() > deadline:
            return False
        time.sleep(ADOPTION_POLL_S)
    return True


def report(line: int) -> bool:
    """Tell the pool who its child is; whether it wants it to go on."""
    with socket.socket(fileno=line) as wire:
        wire.sendall(f"{os.getpid()}\n".encode())
        return wire.recv(len(GO)) == GO


def differ_by_chance() -> None:
    """Processes that were started apart have other random numbers until they are seeded."""
    import numpy.random

    random.seed()
    numpy.random.seed()


def run_module(request: Request) -> int:
    """`python -m MODULE ARGUMENTS`; returns its exit code, if it does not leave by itself."""
    sys.argv = [request.module, *request.arguments]
    try:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        return exit_code(error.code)
    return 0


def exit_code(said: Any) -> int:
    """What Python makes of the argument of `sys.exit`."""
    if said is None or isinstance(said, int):
        return said or 0
    sys.stderr.write(f"{said}\n")
    return 1


BLAS_THREADS = "OPENBLAS_NUM_THREADS"
"""Read by OpenBLAS when it is loaded; it starts its threads at once. numpy and scipy each have a
copy of it that eke does not use, and torch's own must not be touched."""


def main(arguments: Sequence[str]) -> int:
    """Import, say that it is done, and fork as long as somebody asks.

    Args:
        arguments: the socket's descriptor, and modules to import.
    """
    end_with_parent(signal.SIGKILL, os.environ.get(SUPERVISOR, ""))
    with socket.socket(fileno=int(arguments[0])) as control:
        import_all(arguments[1:])
        trouble = why_unfit()
        control.sendall((trouble or READY).encode()[:LONGEST_WORD])
        if trouble:
            return 1
        gc.collect()
        gc.freeze()  # so that the workers' collections leave the shared pages alone
        while (asked := receive_request(control)) is not None:
            request, descriptors = asked
            try:
                orphan(lambda: become(request, descriptors, control))  # noqa: B023  # called at once
            except OSError:  # no process to be had: the pool sees that nobody answers
                traceback.print_exc()
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
                control.sendall(LET_GO)
    return 0


def import_all(modules: Sequence[str]) -> None:
    """Import what workers need; what is not there, they miss."""
    with one_thread():
        import_if_there("numpy.random")  # before eke's own modules import it
    from eke.training.loop.environment import quiet_environment, quiet_imports
    from eke.training.model.imports import import_transformers

    quiet_environment()
    quiet_imports()
    importlib.import_module("eke.training.loop.attempt")
    import_transformers()
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # as the tracker does before it imports wandb
    with one_thread():
        import_if_there("scipy.special")  # what calibrates forecasts, once there are runs enough
    for module in modules:
        import_if_there(module)


def import_if_there(module: str) -> None:
    """Import a module, unless it is not installed."""
    try:
        importlib.import_module(module)
    except ImportError:
        return


@contextmanager
def one_thread() -> Iterator[None]:
    """Load libraries with a BLAS of their own in here."""
    given = os.environ.get(BLAS_THREADS)
    os.environ[BLAS_THREADS] = "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ[BLAS_THREADS]
        else:
            os.environ[BLAS_THREADS] = given


def why_unfit() -> str:
    """What a fork would break, after all imports; empty when nothing."""
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        return "CUDA was initialised by an import"
    opened = [name for name in open_files() if name.startswith("/dev/nvidia")]
    if opened:
        return f"an import has opened {opened[0]}"
    threads = len(os.listdir("/proc/self/task"))
    return f"imports have started {threads - 1} threads" if threads > 1 else ""


def open_files() -> list[str]:
    """What this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the folder that was listed
            continue
    return found


if __name__ == "__main__":
    open_streams("utf-8")
    sys.exit(main(sys.argv[1:]))
