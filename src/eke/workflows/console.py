"""Speaking to the user, once for all ranks."""

import sys

from eke.common.started_ranks import is_first, let_rank_0_speak, my_rank
from eke.common.stdout import speak
from eke.common.streams import lost
from eke.plan.record import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE


def say(text: str) -> int:
    """Print for the user; returns the exit code of a command that does nothing else.

    Of several ranks one speaks.
    """
    if is_first():
        speak(text)
    return EXIT_FAILED if lost() else EXIT_OK


def complain(text: str, code: int) -> int:
    """Say what went wrong, once for all ranks; returns the exit code."""
    if my_rank() and code != EXIT_RESUMABLE:
        let_rank_0_speak()
    if is_first():
        speak(text, sys.stderr)
    return code
