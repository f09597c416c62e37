"""Runtime helpers: messages for an unsupported PyTorch, and garbage collector tuning."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

TESTED = "2.13.0"
"""The release in `constraints.txt`, with which eke is tested."""


def lacking(error: BaseException) -> str:
    """Describe a name that eke needs and the installed PyTorch lacks; empty for other errors."""
    what = str(error).partition(" (")[0]
    owner = ""
    if isinstance(error, ImportError):  # of torch itself, if that is missing
        owner = error.name or ""
    elif isinstance(error, AttributeError):
        owner = f"{getattr(error.obj, '__name__', '')}."
    if not owner.startswith("torch.") and "'_OpNamespace' 'aten'" not in what:
        return ""
    try:
        installed = version("torch")
    except PackageNotFoundError:  # a local build that was not installed by pip
        installed = "of this machine"
    return (
        f"torch {installed} lacks what eke uses ({what}); "
        f"pip install torch=={TESTED} brings the release that eke is tested with"
    )


MANY = 50_000
"""Collection threshold (new objects) of a command that plans; Python 3.11 uses 700."""


def collect_seldom() -> None:
    """Collect rarely in a process that plans: most of its objects live until it ends."""
    gc.set_threshold(MANY)


@contextmanager
def importing() -> Iterator[None]:
    """Disable collection inside, then freeze all objects, garbage too: for the process's start."""
    # Imported modules are never garbage. Scanning them takes a seventh of the import time of torch
    # and transformers, and of a plan's time (notes/lab/startup.md).
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
