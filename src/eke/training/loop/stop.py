"""Stop requests: a flag set by signals, checked between steps and micro-batches."""

import os
import signal
from types import FrameType

from eke.common.paths import AGENT, SUPERVISOR
from eke.common.process_env import end_with_parent
from eke.plan.record import Outcome

_MEANING = {
    signal.SIGINT: Outcome.cancelled,
    signal.SIGTERM: Outcome.preempted,
    signal.SIGUSR1: Outcome.timeout,  # sent by batch systems before a time limit
    signal.SIGUSR2: Outcome.timeout,
}


class StopFlag:
    """Reason to stop at the next step boundary. None to continue."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.signal: str = ""

    def listen(self) -> None:
        """Handle SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 as stop requests."""
        for number in _MEANING:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.outcome is None:
            self.outcome = _MEANING[signal.Signals(number)]
            self.signal = signal.Signals(number).name


class Interrupted(Exception):
    """Raised between two micro-batches. The step is abandoned and repeated after resuming."""


class Stopped(Exception):
    """Raised at a step boundary, after the checkpoint, if configured, is complete."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


def stop_with_supervisor() -> None:
    """End this worker when its parent process ends (Linux): save first if it is the only rank."""
    # The ranks of an agent are killed with it: it outlives its supervisor to stop them in order.
    if agent := os.environ.get(AGENT, ""):
        end_with_parent(signal.SIGKILL, agent)
    elif (supervisor := os.environ.get(SUPERVISOR, "")) != str(os.getpid()):
        end_with_parent(signal.SIGTERM, supervisor)
