"""Runtime helpers: messages for an unsupported PyTorch, and garbage collector tuning.

Imported modules are never garbage. Scanning them takes a seventh of the import time of torch and
transformers, and of a plan's time (docs/lab/startup.md).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

TESTED = "2.13.0"
"""The release in `constraints.txt`, with which eke is tested."""


def lacking(error: BaseException) -> str:
    """Describe a name that eke needs and the installed PyTorch lacks; empty for other errors."""
    what = _missing(error)
    if not what:
        return ""
    try:
        installed = version("torch")
    except PackageNotFoundError:  # a local build that was not installed by pip
        installed = "of this machine"
    return (
        f"torch {installed} lacks what eke uses ({what}); "
        f"pip install torch=={TESTED} brings the release that eke is tested with"
    )


def _missing(error: BaseException) -> str:
    """Name missing from torch; empty if there is none, or torch itself is missing."""
    if isinstance(error, ImportError):
        return str(error).partition(" (")[0] if _is_torchs(error.name) else ""
    if not isinstance(error, AttributeError):
        return ""
    if "'_OpNamespace' 'aten'" in str(error):  # torch.ops raises this text, without the object
        return "torch.ops.aten." + str(error).rpartition("attribute ")[2].strip("'")
    if isinstance(error.obj, ModuleType) and _is_torchs(f"{error.obj.__name__}.{error.name}"):
        return f"{error.obj.__name__}.{error.name}"
    return ""


def _is_torchs(module: str | None) -> bool:
    return module is not None and module.startswith("torch.")


MANY = 50_000
"""Collection threshold (new objects) of a command that plans; Python 3.11 uses 700."""


def collect_seldom() -> None:
    """Collect rarely in a process that plans: most of its objects live until it ends."""
    gc.set_threshold(MANY)


@contextmanager
def importing() -> Iterator[None]:
    """Disable collection inside, then freeze all objects, garbage too: for the process's start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
