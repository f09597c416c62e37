"""Lines for whoever started a command, who may no longer be there."""

import contextlib
import errno
import os
import sys
from typing import TextIO

GONE = (errno.EPIPE, errno.EIO)
"""Nobody reads the pipe any more (`| head`); the terminal was closed."""


def speak(text: str, to: TextIO | None = None) -> None:
    """Print a line at once; once nobody can hear it, keep quiet and go on.

    Args:
        text: without its end of line.
        to: standard output, or standard error.

    Raises:
        OSError: it could be heard, and not said: the disk that it goes to is full.
    """
    stream = to or sys.stdout
    try:
        stream.write(f"{text}\n")
        stream.flush()
    except OSError as error:
        if error.errno not in GONE:
            raise
        # Whatever is printed later, by anybody, and when Python ends, goes nowhere as well.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
