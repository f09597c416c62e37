"""Python's garbage collector, kept from looking through what is never garbage.

Imported modules are millions of objects that stay: collecting among them is a seventh of importing
torch and transformers, and of composing a configuration (docs/lab.md).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 50_000
"""New objects between two collections of a command that composes and plans; Python's is 700."""


def collect_seldom() -> None:
    """For a process that plans: it makes few cycles, and many objects."""
    gc.set_threshold(MANY)


@contextmanager
def importing() -> Iterator[None]:
    """Collect nothing inside, and never look at again what was imported."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
