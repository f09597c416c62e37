"""Python's garbage collector, kept from looking through what is never garbage.

Imported modules stay: looking for garbage among them is a seventh of the time that torch and
transformers take to be imported, and of a plan's (docs/lab.md).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 50_000
"""New objects between two collections of a command that plans; Python 3.11 has 700."""


def collect_seldom() -> None:
    """For a process that plans, most of whose objects live as long as it does."""
    gc.set_threshold(MANY)


@contextmanager
def importing() -> Iterator[None]:
    """Collect nothing inside, and never look again at what is there afterwards.

    Once in a process, before it has garbage of its own: that would stay, too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
