"""`python -m eke.training.loop.fork_server`: imports what workers need, once, and forks them.

It computes nothing and touches no GPU, so that there are no threads and no context that a fork
would break; it waits for requests on a socket and ends with the pool that started it. What it forks
is no child of its own but the pool's (`fork_child`): when it is killed, no run notices.
"""

import gc
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from eke.common.paths import SUPERVISOR
from eke.common.streams import open_streams
from eke.training.loop.fork_child import become, orphan
from eke.training.loop.fork_request import LET_GO, LONGEST_WORD, READY, receive_request
from eke.training.loop.stop import end_with_parent

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
    from eke.training.loop.silence_libraries import quiet_environment, quiet_imports
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
