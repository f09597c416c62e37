"""Dropout probabilities of a configuration of transformers."""

import re
from collections.abc import Iterator
from typing import Any

from eke.common.errors import RunError

_OTHER = re.compile(r"layer_?drop|drop_?path|drop_?layer|token_?drop|router|mask")
"""Names of rates of dropped layers, paths and tokens, which are not dropout of activations."""


def set_dropout(config: Any, value: float) -> None:
    """Set the probability of every dropout, also nested ones. RunError: A class rejects it."""
    for part in _parts(config):
        for name, found in list(vars(part).items()):
            # None means the value of another field (`classifier_dropout`).
            number = type(found) in (float, int, type(None))
            if number and "drop" in name and not _OTHER.search(name):
                try:
                    setattr(part, name, value)
                except Exception as error:  # of huggingface_hub. MPT declares an integer
                    why, fix = f"{type(part).__name__} rejects it as {name}", "model.dropout=null"
                    raise RunError(f"model.dropout = {value:g}: {why}\n  -> {fix}") from error


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if part is not None:
            yield from _parts(part)
