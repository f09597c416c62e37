"""Of a PyTorch that is newer, or older, than what eke has been tried with: what it has not.

Python's garbage collector, kept from looking through what is never garbage.

Imported modules stay: looking for garbage among them is a seventh of the time that torch and
transformers take to be imported, and of a plan's (docs/lab/startup.md).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

TESTED = "2.13.0"
"""The release of `constraints.txt`, with which everything has been seen to run."""


def lacking(error: BaseException) -> str:
    """That an installed PyTorch has not a name which eke uses; empty for any other error.

    Args:
        error: what was raised where the name was looked for.
    """
    what = _missing(error)
    if not what:
        return ""
    try:
        installed = version("torch")
    except PackageNotFoundError:  # a build of one's own that was not installed by pip
        installed = "of this machine"
    return (
        f"torch {installed} lacks what eke uses ({what}); "
        f"pip install torch=={TESTED} brings the release that eke is tested with"
    )


def _missing(error: BaseException) -> str:
    """Name of what is missing from torch; empty where nothing is, or all of torch."""
    if isinstance(error, ImportError):
        return str(error).partition(" (")[0] if _is_torchs(error.name) else ""
    if not isinstance(error, AttributeError):
        return ""
    if "'_OpNamespace' 'aten'" in str(error):  # torch.ops' own words, without the object
        return "torch.ops.aten." + str(error).rpartition("attribute ")[2].strip("'")
    if isinstance(error.obj, ModuleType) and _is_torchs(f"{error.obj.__name__}.{error.name}"):
        return f"{error.obj.__name__}.{error.name}"
    return ""


def _is_torchs(module: str | None) -> bool:
    return module is not None and module.startswith("torch.")


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
