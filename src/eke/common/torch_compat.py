"""Of a PyTorch that is newer, or older, than what eke has been tried with: what it has not."""

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
