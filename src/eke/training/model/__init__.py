"""Model: construction, attention, adapters, loss, precision, compilation.

Here: the import of transformers without its optional dependencies.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from eke.common.runtime import importing

NEEDLESS = {
    "scipy": "is_scipy_available",  # losses of object detection, which are no task here
    "torchao": "is_torchao_available",  # weights quantized by it, which no checkpoint may have
    "trio": None,  # httpcore2's asynchronous half, in huggingface_hub
}
"""Package -> the function of transformers that remembers whether it is there. What transformers
5.23 and huggingface_hub 2.4 import with every model, where these happen to be installed: an eighth
of a start, in the median (docs/lab/startup.md). Neither has a switch for it."""


def import_transformers() -> None:
    """Import what every model of transformers needs; other packages can be imported later."""
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
    """Have Python find none of these packages, but for those that are imported already."""
    names = [name for name in packages if name not in sys.modules]
    # The import system's own way to say that there is no such module (Python's reference, 5.3.1).
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # typeshed: no None there
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
