"""Rich's console: colours and cursor movements are its own, and what it shows is text."""

from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from eke.printable import printable
from eke.streams import with_controls


class _Console(Console):
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, lines=True), style, control)


def open_console(to: TextIO, width: int | None = None, terminal: bool | None = None) -> Console:
    """A console that reads no markup.

    Args:
        to: where it writes.
        width: columns; None is the terminal's.
        terminal: with colours; None for a terminal alone.
    """
    return _Console(
        file=with_controls(to), width=width, force_terminal=terminal,
        highlight=False, markup=False, emoji=False,
    )  # fmt: skip
