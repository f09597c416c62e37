"""Model: construction, attention, adapters, loss, precision, compilation.

Functions import transformers, so that importing a module stays cheap.
"""

import importlib
import sys

from eke.common.python_runtime import importing

NEEDLESS = {
    "scipy": "is_scipy_available",  # for losses of object detection, which eke does not train
    "torchao": "is_torchao_available",  # for torchao checkpoints, which eke rejects
    "trio": None,  # for asynchronous requests of httpcore2, in huggingface_hub
}
"""Package -> function of transformers that caches whether it is installed. transformers 5.23 and
huggingface_hub 2.4 import these with every model: an eighth of a start (notes/lab/startup.md)."""


def import_transformers() -> None:
    """Import the modules that every model of transformers needs, with `NEEDLESS` hidden."""
    if "transformers.modeling_utils" in sys.modules:
        return
    hidden = [name for name in NEEDLESS if name not in sys.modules]
    # None in sys.modules means that a module does not exist (Python's reference, 5.3.1).
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # typeshed: no None there
    try:
        with importing():
            importlib.import_module("transformers.modeling_utils")
    finally:
        for name in hidden:
            del sys.modules[name]
    asked = importlib.import_module("transformers.utils.import_utils")
    for function in NEEDLESS.values():
        if forget := getattr(getattr(asked, function or "", None), "cache_clear", None):
            forget()
