"""Being asked to stop: a flag set by signals, looked at between steps and micro-batches."""

import ctypes
import os
import signal
from types import FrameType

from eke.common.paths import AGENT, SUPERVISOR
from eke.plan.record import Outcome

_MEANING = {
    signal.SIGINT: Outcome.cancelled,
    signal.SIGTERM: Outcome.preempted,
    signal.SIGUSR1: Outcome.timeout,  # what batch systems are asked to send before a time limit
    signal.SIGUSR2: Outcome.timeout,
}


class StopFlag:
    """Why the run should stop at the next step boundary; None while it should go on."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.signal: str = ""

    def listen(self) -> None:
        """Turn SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 into a request to stop."""
        for number in _MEANING:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.outcome is None:
            self.outcome = _MEANING[signal.Signals(number)]
            self.signal = signal.Signals(number).name


class Interrupted(Exception):
    """Raised between two micro-batches: the step is given up, and taken again after resumption."""


class Stopped(Exception):
    """Raised at a step boundary, once the checkpoint is complete."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


def stop_with_supervisor() -> None:
    """Leave no orphan that trains on unseen when whoever started this worker dies (Linux).

    Without its supervisor it saves a checkpoint and ends as preempted. One of several ranks is
    killed with the agent that started them: the agent outlives its supervisor to stop them in
    order, so when it is gone, somebody wants all of them gone.
    """
    if agent := os.environ.get(AGENT, ""):
        end_with_parent(signal.SIGKILL, agent)
    elif (supervisor := os.environ.get(SUPERVISOR, "")) != str(os.getpid()):
        end_with_parent(signal.SIGTERM, supervisor)


def end_with_parent(number: signal.Signals, parent: str) -> None:
    """Have the kernel send a signal to this process when its parent dies, or has died already.

    Args:
        number: the signal.
        parent: process id of whoever started this process; without one nothing is asked for.
    """
    if not parent.isdigit():
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
    try:
        ctypes.CDLL(None).prctl(set_parent_death_signal, number)
    except (OSError, AttributeError):  # not Linux: nothing to ask for
        return
    if os.getppid() != int(parent):  # gone while this process was importing: nobody was told
        os.kill(os.getpid(), number)
