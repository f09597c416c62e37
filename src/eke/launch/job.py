"""A run that a sweep has to do, and how far it is."""

import time
from dataclasses import dataclass, field
from typing import Protocol

from eke.hardware import DeviceSlot
from eke.launch.folder import Place
from eke.plan import Plan
from eke.record import Outcome, Record

MAX_CRASHES = 2
"""Times a run may crash in one command without getting any further: once may be the machine's
fault, twice at the same step is the program's."""

MAX_INTERRUPTIONS = 5
"""Times it may be stopped by somebody else in one command without getting any further."""

CHANGED = "as_planned"
"""Of a run that its worker refused: its input or the software was no longer what was planned."""

_RETRIED = {
    Outcome.crashed: MAX_CRASHES,
    Outcome.preempted: MAX_INTERRUPTIONS,
    Outcome.timeout: MAX_INTERRUPTIONS,
}


class Running(Protocol):
    """One attempt at a run in a process of its own."""

    place: Place

    def is_over(self) -> bool:
        """Whether it has ended."""
        ...

    def ask(self, number: int) -> None:
        """Hand a signal on."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    def finish(self) -> Record:
        """Its record."""
        ...


class RunningHere(Running, Protocol):
    """One on this machine."""

    @property
    def pid(self) -> int:
        """Its process, or the one that has started all others."""
        ...


class Held(Protocol):
    """Devices that a run holds."""

    def uses(self, slot: DeviceSlot) -> bool:
        """Whether some of the memory of a slot is this run's."""
        ...

    def release(self) -> None:
        """Let them go."""
        ...


@dataclass(eq=False)
class Job:
    """One run of a sweep."""

    number: int
    """Of its first cell, from 0."""
    label: str
    """What sets it apart from the others."""
    plan: Plan
    cells: list[int] = field(default_factory=list)
    """Numbers of all cells that are this run, its own first."""
    outcome: Outcome | None = None
    """How it ended; None while there is something to do."""
    reason: str = ""
    """Why it did not end well, or did not run."""
    rule: str = ""
    """The rule that kept it from starting; empty when none did, or one without an identifier."""
    record: Record | None = None
    folder: str = ""
    reused: bool = False
    """Answered from the record of an earlier run."""
    live: Running | None = None
    grant: Held | None = None
    pid: int = 0
    """Of its worker, or of what has started its workers; 0 where that is on another machine."""
    where: str = ""
    """Its devices or its node, as a table shows them."""
    started: float = 0.0
    """time.monotonic() of the current attempt."""
    lasted_s: float = 0.0
    """Seconds its attempts took."""
    not_before: float = 0.0
    """time.monotonic() before which there is no use in trying."""
    overtaken: int = 0
    """Times a later run was started while this one waited for its devices."""
    waiting_for: str = ""
    """Who holds the run or its devices; empty when nobody does."""
    tries: dict[Outcome, int] = field(default_factory=dict)
    """Ends without a step more than before."""
    steps_before: int = 0

    def __post_init__(self) -> None:
        self.cells = self.cells or [self.number]

    @property
    def kind(self) -> str:
        """Of device it runs on: `cuda` or `cpu`."""
        return self.plan.device.kind

    @property
    def num_devices(self) -> int:
        """Devices it needs at once."""
        return self.plan.batch.world_size * self.plan.batch.devices

    def is_waiting(self) -> bool:
        """Whether it could be started."""
        return self.outcome is None and self.live is None

    def is_due(self) -> bool:
        """Whether it could be started now."""
        return self.is_waiting() and time.monotonic() >= self.not_before

    def settle(self, record: Record) -> bool:
        """Take note of how an attempt ended; returns whether there should be another one."""
        outcome = Outcome[record.outcome]
        if record.steps_done > self.steps_before:
            self.tries.clear()
        self.steps_before = record.steps_done
        self.tries[outcome] = self.tries.get(outcome, 0) + 1
        self.record = record
        if self.tries[outcome] < _RETRIED.get(outcome, 0):
            return True
        rule = CHANGED if outcome is Outcome.refused else ""
        self.end(outcome, record.failure.message if record.failure else "", rule)
        return False

    def end(self, outcome: Outcome, reason: str = "", rule: str = "") -> None:
        """Nothing more is to be done."""
        self.outcome, self.reason, self.rule, self.waiting_for = outcome, reason, rule, ""
