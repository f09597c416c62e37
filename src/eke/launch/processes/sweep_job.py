"""A run that a sweep has to do, and how far it is."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from eke.common.units import format_seconds
from eke.hardware import DeviceSlot
from eke.launch.processes.run_dir import Place
from eke.plan.planner import Plan
from eke.plan.record import Outcome, Record

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


def worth_of(record: Record, before: Record | None, elapsed_s: float) -> tuple[float, float]:
    """Seconds of training that an attempt has added, and that its start took, as far as known.

    Args:
        record: what it left.
        before: what the attempt before it left.
        elapsed_s: all its seconds.
    """
    trained_s = (before and before.timing.train_s) or 0.0
    gained = max(0.0, (record.timing.train_s or 0.0) - trained_s)
    started = record.timing.startup_s
    return gained, max(0.0, elapsed_s - gained) if started is None else started


def are_in_vain(worths: Sequence[Sequence[float]], number: int = MAX_INTERRUPTIONS) -> str:
    """Why the newest of these attempts (`worth_of`) are no use: longer to start than to train.

    Empty where they are, where there are fewer, and where they got nowhere, which is counted.
    """
    gained, started = (sum(w[k] for w in worths[-number:]) for k in (0, 1))
    if not 0 < number <= len(worths) or not 0 < gained < started:
        return ""
    times = f"{format_seconds(gained)}, and their starts took {format_seconds(started)}"
    return f"{number} attempts in a row trained for {times}; the same command goes on"


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
    worths: list[tuple[float, float]] = field(default_factory=list)
    """Of its attempts in this command: see `worth_of`."""

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
        elapsed_s = time.monotonic() - self.started if self.started else 0.0
        self.worths.append(worth_of(record, self.record, elapsed_s))
        self.tries[outcome] = self.tries.get(outcome, 0) + 1
        self.record = record
        vain = are_in_vain(self.worths) if outcome in _RETRIED else ""
        if not vain and self.tries[outcome] < _RETRIED.get(outcome, 0):
            return True
        rule = CHANGED if outcome is Outcome.refused else ""
        self.end(outcome, vain or (record.failure.message if record.failure else ""), rule)
        return False

    def end(self, outcome: Outcome, reason: str = "", rule: str = "") -> None:
        """Nothing more is to be done."""
        self.outcome, self.reason, self.rule, self.waiting_for = outcome, reason, rule, ""
