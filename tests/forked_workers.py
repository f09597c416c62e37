"""`python train.py ...` whose workers are forked, not started: torch is imported once for all.

A fresh worker imports torch and transformers for four seconds to train for less. Each one is still
a child of the command, in a new session, with its own environment, output and exit code.
Ranks, their agent and helper processes are started as always, and what is told of a run's own
process (signals, kills, peaks of a fresh process) is for `train_py` and `start` to test.
"""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import python_server
from rank_server import differ_by_chance, load
from support import Finished, environment

from eke.common.files import open_file
from eke.common.plugins import TRAINING_WORKER
from eke.launch.processes import worker_process

START = worker_process.start_process
CODE = "from forked_workers import main; sys.exit(main(sys.argv[1:]))"


def run(folder: Path, *arguments: str, **variables: str) -> Finished:
    """`eke ARGUMENTS` to its end, typed in a folder by a user with these variables only."""
    return python_server.run(
        0, CODE, *arguments, cwd=folder, environment=environment(folder) | variables,
        modules=("rank_server:load", "forked_workers", *python_server.MODULES),
    )  # fmt: skip


class Forked:
    """A child, with what eke uses of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def poll(self) -> int | None:
        """The exit code, None before the end."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """The exit code."""
        code = self._wait(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def start_or_fork(
    command: Sequence[str],
    log: Path,
    descriptors: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
):
    """As `start_process`; a worker is forked."""
    if TRAINING_WORKER not in command:
        return START(command, log, descriptors, environment)
    output = open_file(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if pid := os.fork():
        os.close(output)
        return Forked(pid)
    code = 1
    try:
        be_apart(output, descriptors)
        os.environ.clear()
        os.environ.update(environment or {})
        sys.argv = [*command[3:]]
        differ_by_chance()
        code = importlib.import_module(TRAINING_WORKER).main(list(command[4:]))
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def be_apart(output: int, descriptors: Sequence[int]) -> None:
    """Be a session with these open files and plain signals, as what `subprocess` starts."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for standard in (1, 2):
        os.dup2(output, standard)
    sys.stdout.reconfigure(line_buffering=True)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in descriptors:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(descriptor)
    for number in signal.valid_signals() - {signal.SIGINT}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main(arguments: list[str]) -> int:
    """`eke ARGUMENTS`, with forked workers."""
    worker_process.start_process = start_or_fork
    from eke.cli import main as eke

    return eke(arguments)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: no worker has it
    load()
    sys.exit(main(sys.argv[1:]))
