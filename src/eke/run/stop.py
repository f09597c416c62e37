"""Being asked to stop: a flag set by signals, looked at between two steps."""

import ctypes
import os
import signal
from types import FrameType

from eke.paths import SUPERVISOR
from eke.record import Outcome

_MEANING = {
    signal.SIGINT: Outcome.cancelled,
    signal.SIGTERM: Outcome.preempted,
    signal.SIGUSR1: Outcome.preempted,
    signal.SIGUSR2: Outcome.preempted,
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


class Stopped(Exception):
    """Raised at a step boundary, once the checkpoint is complete."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


def stop_with_supervisor() -> None:
    """Have the kernel send SIGTERM to this process when its supervisor dies (Linux).

    So that killing the supervisor leaves no orphan that trains on unseen; it saves a checkpoint
    and ends as preempted.
    """
    if os.environ.get(SUPERVISOR) != str(os.getppid()):
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
    try:
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    except (OSError, AttributeError):  # not Linux: nothing to ask for
        return
