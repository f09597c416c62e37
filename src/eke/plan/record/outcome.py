"""How a run, or a cell that never ran, ended: a closed set."""

from enum import Enum

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_RESUMABLE = 75
"""`EX_TEMPFAIL` of sysexits.h: interrupted, the same command continues it."""


class Outcome(Enum):
    """How a run ended."""

    ok = "ok"
    oom = "oom"
    diverged = "diverged"
    timeout = "timeout"
    preempted = "preempted"
    crashed = "crashed"
    cancelled = "cancelled"
    refused = "refused"
    skipped = "skipped"

    @property
    def is_final(self) -> bool:
        """Whether running the same thing again would only repeat it."""
        return self in (Outcome.ok, Outcome.oom, Outcome.diverged)

    @property
    def exit_code(self) -> int:
        """What the process that reports this outcome exits with."""
        if self is Outcome.ok:
            return EXIT_OK
        if self in (Outcome.timeout, Outcome.preempted, Outcome.cancelled):
            return EXIT_RESUMABLE
        return EXIT_USER if self is Outcome.refused else EXIT_FAILED
