"""A run on this machine: what is said when it cannot begin, or is stopped before it has."""

import errno
import os
import signal
import sys

import pytest

from eke.common.errors import RunError
from eke.launch.processes.run_attempt import TOO_EARLY, RunAttempt
from eke.launch.processes.run_dir import lock_run_folder
from eke.plan.record import DeadRank, write_end


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOMEM, "the machine cannot start another process: Cannot allocate memory"),
        (errno.EAGAIN, "the machine cannot start another process"),
        (errno.ENOSPC, "cannot be written: No space left on device"),
    ],
)
def test_failed_worker_start_releases_the_folder(number, words, paths, plan, monkeypatch) -> None:
    def start(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("subprocess.Popen", start)
    with pytest.raises(RunError, match=words):
        RunAttempt(plan, paths, 1)
    with lock_run_folder(paths):
        pass


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT], ids=["rights", "gone"])
def test_interpreter_that_cannot_be_executed_is_named(number, paths, plan, monkeypatch) -> None:
    """Nothing is wrong with the folder: an environment was moved, or lost its rights, meanwhile."""
    python = paths.folder.parent / "python"
    if number == errno.EACCES:
        python.touch(mode=0o600)
    monkeypatch.setattr(sys, "executable", str(python))
    words = rf"^{python} cannot be used: {os.strerror(number)}$"
    with pytest.raises(RunError, match=words):
        RunAttempt(plan, paths, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_worker_cancelled_before_it_listens_has_not_crashed(
    number, paths, plan, monkeypatch
) -> None:
    """Ctrl-C in the second in which Python starts."""

    command = "eke.launch.processes.worker_process.worker_command"
    monkeypatch.setattr(command, lambda *_: ["sleep", "600"])
    live = RunAttempt(plan, paths, 1)
    live.ask(number)
    live.worker.process.wait()
    record = live.finish()
    assert (record.outcome, record.exit_code) == ("cancelled", 75)
    assert record.failure.message == TOO_EARLY, "one Ctrl-C kills nothing"


def test_ranks_cancelled_before_they_listen_have_not_crashed(paths, plan, monkeypatch) -> None:
    command = "eke.launch.processes.worker_process.worker_command"
    monkeypatch.setattr(command, lambda *_: ["sh", "-c", "exit 1"])
    live = RunAttempt(plan, paths, 2)
    live.ask(signal.SIGINT)
    live.worker.process.wait()
    write_end(paths, DeadRank(0, 1, -signal.SIGINT))
    record = live.finish()
    assert (record.outcome, record.exit_code) == ("cancelled", 75)
    assert record.failure.message == TOO_EARLY
