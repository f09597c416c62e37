"""From a fork of the server to the process that the pool would have started afresh."""

import os
import random
import runpy
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from eke.common.paths import SUPERVISOR
from eke.training.loop.fork_request import GO, Request

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
