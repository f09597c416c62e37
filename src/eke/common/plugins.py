"""Extensions that other installed packages register as entry points."""

from functools import cache
from importlib.metadata import entry_points
from typing import Any


@cache
def load_plugin(group: str, name: str) -> Any:
    """The object an entry point refers to; None where no installed package has this one.

    Reading every package's metadata takes tens of milliseconds: look among eke's own first.

    Args:
        group: such as `eke.optimizers`.
        name: of the option.
    """
    found = tuple(entry_points(group=group, name=name))
    return found[0].load() if found else None
