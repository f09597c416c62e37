"""Dropout probabilities of a configuration of transformers."""

import re
from typing import Any

from eke.common.errors import RunError

_OTHER = re.compile(r"layer_?drop|drop_?path|drop_?layer|token_?drop|router|mask")
"""Names of rates of dropped layers, paths and tokens, which are not dropout of activations."""


def set_dropout(config: Any, value: float) -> None:
    """Set the probability of every dropout, also nested ones. RunError: A class rejects it."""
    for name, found in list(vars(config).items()):
        # None means the value of another field (`classifier_dropout`).
        number = type(found) in (float, int, type(None))
        if number and "drop" in name and not _OTHER.search(name):
            try:
                setattr(config, name, value)
            except Exception as error:  # of huggingface_hub. MPT declares an integer
                why, fix = f"{type(config).__name__} rejects it as {name}", "model.dropout=null"
                raise RunError(f"model.dropout = {value:g}: {why}\n  -> {fix}") from error
    for name in getattr(config, "sub_configs", None) or ():
        if (part := getattr(config, name, None)) is not None:
            set_dropout(part, value)
