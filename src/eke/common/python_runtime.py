"""Messages for an unsupported PyTorch, and settings of the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

TESTED = "2.13.0"
"""Release of torch in `constraints.txt`, used in eke's tests."""


def describe_missing_api(error: BaseException) -> str:
    """Return a message for a name that the installed PyTorch lacks, "" for other errors."""
    what = str(error).partition(" (")[0]
    owner = ""
    if isinstance(error, ImportError):  # the name of torch itself if it is missing
        owner = error.name or ""
    elif isinstance(error, AttributeError):
        owner = f"{getattr(error.obj, '__name__', '')}."
    if not owner.startswith("torch.") and "'_OpNamespace' 'aten'" not in what:
        return ""
    try:
        installed = version("torch")
    except PackageNotFoundError:  # a local build
        installed = "of this machine"
    return f"torch {installed} is not supported ({what}). Tested: pip install torch=={TESTED}"


GC_THRESHOLD = 50_000
"""Collection threshold (new objects) of planning commands. Python 3.11 uses 700."""


def relax_gc() -> None:
    """Collect rarely, for planning: most objects live until the process ends."""
    gc.set_threshold(GC_THRESHOLD)


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection inside, then freeze all objects, for the start of a process."""
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
