"""Signals become a request to stop; a dead supervisor is a signal, too."""

import os
import signal
import subprocess
import sys

import pytest
from support import environment


@pytest.fixture
def listening():
    """A flag that listens in this process; the handlers of before come back."""
    from eke.training.loop.stop import StopFlag

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    flag = StopFlag()
    flag.listen()
    yield flag
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (signal.SIGINT, "cancelled"),
        (signal.SIGTERM, "preempted"),
        (signal.SIGUSR1, "timeout"),
        (signal.SIGUSR2, "timeout"),
    ],
    ids=["ctrl-c", "sigterm", "usr1", "usr2"],
)
def test_first_signal_requests_a_stop(number, outcome, listening) -> None:
    assert listening.outcome is None
    signal.raise_signal(number)
    signal.raise_signal(signal.SIGUSR1 if number == signal.SIGINT else signal.SIGINT)
    assert (listening.outcome.value, listening.signal) == (outcome, number.name)


ORPHAN = """
import os, signal, sys
from eke.training.loop.stop import StopFlag, stop_with_supervisor
flag = StopFlag()
flag.listen()
stop_with_supervisor()
print(os.getpid(), flush=True)
while flag.outcome is None:
    signal.pause()
open(sys.argv[1], "w").write(flag.outcome.value)
print("stopped", flush=True)
"""

SUPERVISOR = """
import os, subprocess, sys
variables = {**os.environ, "EKE_SUPERVISOR": str(os.getpid())}
subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], env=variables).wait()
"""


def test_supervisor_death_stops_the_worker(tmp_path) -> None:
    told = tmp_path / "outcome"
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(told), ORPHAN],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
    )
    worker = int(supervisor.stdout.readline())
    supervisor.kill()
    supervisor.wait()
    try:
        # The pipe is the worker's, too: this waits for its word, without a clock.
        assert supervisor.stdout.readline() == "stopped\n"
    finally:
        supervisor.stdout.close()
        if os.path.exists(f"/proc/{worker}") and not told.exists():
            os.kill(worker, signal.SIGKILL)
    assert told.read_text() == "preempted"


LATE = """
import os, sys, time
while os.getppid() == int(os.environ["EKE_SUPERVISOR"]):
    time.sleep(0.001)  # imports, in which the supervisor dies
""" + ORPHAN.replace("while flag.outcome is None:", "if flag.outcome is None:")


def test_supervisor_death_during_imports_stops_the_worker(tmp_path) -> None:
    """The kernel tells nobody of a parent that was gone before it was asked."""
    told = tmp_path / "outcome"
    leave = SUPERVISOR.replace(".wait()", "")
    subprocess.run(
        [sys.executable, "-c", leave, str(told), "import signal; signal.alarm(60)" + LATE],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        check=True,
    )  # the pipe is the worker's, too: this waits for its end
    assert told.read_text() == "preempted"


RANK = """
import os, signal, time
signal.alarm(60)
while os.getppid() == int(os.environ["EKE_AGENT"]):
    time.sleep(0.001)
from eke.training.loop.stop import stop_with_supervisor
stop_with_supervisor()
print("trains on unseen", flush=True)
"""


def test_rank_without_agent_during_imports_is_killed(tmp_path) -> None:
    agent = SUPERVISOR.replace("EKE_SUPERVISOR", "EKE_AGENT").replace(".wait()", "")
    ended = subprocess.run(
        [sys.executable, "-c", agent, "", RANK],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert ended.stdout == ""


def test_worker_without_supervisor_sets_no_death_signal(monkeypatch) -> None:
    """A hand-started worker, and one whose variable names a process that is not its parent."""
    import ctypes

    from eke.training.loop.stop import stop_with_supervisor

    monkeypatch.setattr(ctypes, "CDLL", lambda *_: pytest.fail("the kernel was asked"))
    monkeypatch.delenv("EKE_SUPERVISOR", raising=False)
    stop_with_supervisor()
    monkeypatch.setenv("EKE_SUPERVISOR", str(os.getpid()))
    stop_with_supervisor()
    monkeypatch.setenv("EKE_SUPERVISOR", "no number")
    stop_with_supervisor()
