"""Lines for whoever started a command, who may no longer be there (see `eke.common.streams`)."""

import sys
from typing import TextIO


def speak(text: str, to: TextIO | None = None) -> None:
    """Print a line at once.

    Args:
        text: without its end of line.
        to: standard output, or standard error.
    """
    stream = to or sys.stdout
    stream.write(f"{text}\n")
    stream.flush()
