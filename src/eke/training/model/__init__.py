"""Model: construction, attention, adapters, loss, precision, compilation.

Functions import transformers, so that importing a module stays cheap.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from eke.common.python_runtime import importing

NEEDLESS = {
    "scipy": "is_scipy_available",  # for losses of object detection, which eke does not train
    "torchao": "is_torchao_available",  # for torchao checkpoints, which eke rejects
    "trio": None,  # for asynchronous requests of httpcore2, in huggingface_hub
}
"""Package -> function of transformers that caches whether it is installed. transformers 5.23 and
huggingface_hub 2.4 import these with every model: an eighth of a start (notes/lab/startup.md)."""


def import_transformers() -> None:
    """Import the modules that every model of transformers needs."""
    if "transformers.modeling_utils" in sys.modules:
        return
    with importing(), hidden(list(NEEDLESS)):
        importlib.import_module("transformers.modeling_utils")
    asked = importlib.import_module("transformers.utils.import_utils")
    for name in NEEDLESS.values():
        if forget := getattr(getattr(asked, name or "", None), "cache_clear", None):
            forget()


@contextmanager
def hidden(packages: Sequence[str]) -> Iterator[None]:
    """Hide these packages from Python inside the block, unless they are imported already."""
    names = [name for name in packages if name not in sys.modules]
    # None in sys.modules means that a module does not exist (Python's reference, 5.3.1).
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # typeshed: no None there
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
