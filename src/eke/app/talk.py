"""Speaking to the user, once for all ranks."""

import sys

from eke.launch import is_first, let_rank_0_speak, my_rank
from eke.record import EXIT_OK, EXIT_RESUMABLE


def say(text: str) -> int:
    """Print for the user; returns the exit code of having said it. Of several ranks one speaks."""
    if is_first():
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    return EXIT_OK


def complain(text: str, code: int) -> int:
    """Say what went wrong, once for all ranks; returns the exit code."""
    if my_rank() and code != EXIT_RESUMABLE:
        let_rank_0_speak()
    if is_first():
        sys.stderr.write(text + "\n")
    return code
