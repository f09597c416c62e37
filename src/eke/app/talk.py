"""Speaking to the user, once for all ranks."""

import sys

from eke.peers import is_first, let_rank_0_speak, my_rank, speak
from eke.record import EXIT_OK, EXIT_RESUMABLE


def say(text: str) -> int:
    """Print for the user, if still there; returns the exit code. Of several ranks one speaks."""
    if is_first():
        speak(text)
    return EXIT_OK


def complain(text: str, code: int) -> int:
    """Say what went wrong, once for all ranks; returns the exit code."""
    if my_rank() and code != EXIT_RESUMABLE:
        let_rank_0_speak()
    if is_first():
        speak(text, sys.stderr)
    return code
