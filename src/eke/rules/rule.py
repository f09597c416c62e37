"""What a rule is: data, so that it can be listed, documented and switched off by a test."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from eke.common.errors import Problem
from eke.config.schema import Config
from eke.hardware import Device


class Verdict(Enum):
    """What follows when a rule's condition holds."""

    impossible = "impossible"
    """Cannot run, or would run as something else: refused."""
    unsafe = "unsafe"
    """Runs, and may go wrong: warned about."""
    no_effect = "no effect"
    """Runs as if it had not been asked for: warned about."""
    no_benefit = "no benefit"
    """Runs as asked for, and saves nothing, or less than it could: warned about."""


@dataclass(frozen=True)
class Facts:
    """All that rules may look at."""

    config: Config
    device: Device
    planning: bool = False
    """Only a plan is wanted: nothing will be run here."""
    num_nodes: int = 1
    """Machines that this command can use."""


@dataclass(frozen=True)
class Rule:
    """One known incompatibility."""

    id: str
    verdict: Verdict
    path: str
    """Key path the problem is shown under."""
    when: Callable[[Facts], bool]
    """Condition; numbers are within their limits when it is asked."""
    value: Callable[[Facts], object]
    """The offending value."""
    why: Callable[[Facts], str]
    """The limit that is broken, with its number."""
    fix: Callable[[Facts], str]
    """The literal override to type."""
    source: str
    """Where this is known from: a URL, or the formula it follows from."""
    versions: str = ""
    """Library versions it holds for; empty when it does not depend on any."""
    sized: bool = False
    """Needs the size of the model: looked at only when nothing else is impossible."""
    passing: bool = False
    """Says what the machine is short of at the moment, and nothing about what was typed."""

    def problem(self, facts: Facts) -> Problem:
        """The rule's finding, for a person."""
        from eke.common.units import format_value

        value = format_value(self.value(facts))
        return Problem(self.path, value, self.why(facts), self.fix(facts), self.id, self.passing)
