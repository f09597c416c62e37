"""A line that says how far the planning of a large sweep has come."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from eke.common.streams import unfiltered
from eke.common.units import format_number

QUIET_S = 2.0
"""Planning that is over sooner needs no line."""

PAUSE_S = {True: 0.2, False: 10.0}
"""Between two lines: on a terminal they overwrite each other, in a log they add up."""


class PlanningLine:
    """Written to stderr, on a terminal one line that is wiped at the end.

    Args:
        stream: where to; stderr if None.
        clock: seconds.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = unfiltered(stream or sys.stderr)
        self._clock = clock
        self._due = clock() + QUIET_S
        self._written = ""
        self._last = ""
        """What was not shown, since the line before it was shown a moment ago."""

    def composed(self, done: int, total: int) -> None:
        """So many cells are composed."""
        self._show(f"composed {done} of {format_number(total, 'cell')}")

    def planned(self, done: int, total: int) -> None:
        """So many cells are checked and planned."""
        self._show(f"checked and planned {done} of {format_number(total, 'cell')}")

    def traced(self, done: int, total: int) -> None:
        """The memory of so many cells is traced, of those that may not fit."""
        self._show(f"traced the memory of {done} of {format_number(total, 'cell')}")

    def combined(self, done: int, total: int) -> None:
        """So many sets of techniques are checked."""
        self._show(f"checked {done} of {total} sets of techniques")

    def close(self) -> None:
        """The last count where lines add up; on a terminal the line is wiped, if there is one."""
        if self._last and self._written and not self._stream.isatty():
            self._stream.write(f"{self._last}\n")
            self._stream.flush()
        if self._written and self._stream.isatty():
            self._stream.write("\r" + " " * len(self._written) + "\r")
            self._stream.flush()

    def _show(self, text: str) -> None:
        now = self._clock()
        self._last = text
        if now < self._due:
            return
        self._last = ""
        is_terminal = self._stream.isatty()
        self._due = now + PAUSE_S[is_terminal]
        padded = text.ljust(len(self._written))
        self._stream.write(f"\r{padded}" if is_terminal else f"{text}\n")
        self._stream.flush()
        self._written = padded
