"""`model.dropout`: one probability for every dropout of a checkpoint's architecture."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eke.common.errors import RunError

_DROPOUT = re.compile(r"drop")
_OTHER = re.compile(r"layer_?drop|drop_?path|drop_?layer|token_?drop|router|mask")
"""Layers, paths and tokens that are left out whole: named alike, and no dropout of activations."""


def set_dropout(config: Any, value: float) -> None:
    """Set every field that is a dropout's probability, of the nested configurations, too.

    Raises:
        RunError: the configuration class refuses the value.
    """
    for part in _parts(config):
        for name, found in list(vars(part).items()):
            if _is_number(found) and _DROPOUT.search(name) and not _OTHER.search(name):
                try:
                    setattr(part, name, value)
                except Exception as error:  # huggingface_hub's; MPT declares a whole number
                    why = f"{type(part).__name__} does not take it as {name}"
                    fix = "model.dropout=null"
                    raise RunError(f"model.dropout = {value:g}: {why}\n  -> {fix}") from error


def kept_dropouts(
    model: nn.Module, value: float, inputs: Mapping[str, Tensor]
) -> tuple[float, ...]:
    """Probabilities other than `value` that one training forward pass uses, without those of 0.

    Fields that leave out something else than activations are not counted.

    Args:
        model: its mode is left as it was.
        value: the wanted probability.
        inputs: of the forward pass.
    """
    mine: Any = model
    others = {
        float(found)
        for part in _parts(mine.config)
        for name, found in vars(part).items()
        if _DROPOUT.search(name) and _OTHER.search(name) and isinstance(found, float | int)
    }
    training = model.training
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            with torch.no_grad(), recorded_dropouts() as used:
                model.train()(**inputs)
        finally:
            model.train(training)
    return tuple(sorted({p for p in used if p not in (0.0, value)} - others))


@contextmanager
def recorded_dropouts() -> Iterator[list[float]]:
    """The probability of each call of dropout and of attention that trains."""
    used: list[float] = []

    def recording(call: Callable[..., Tensor], name: str, place: int) -> Callable[..., Tensor]:
        def recorded(*args: Any, **kwargs: Any) -> Tensor:
            default = 0.0 if name == "dropout_p" else 0.5
            p = kwargs.get(name, args[place] if len(args) > place else default)
            if name == "dropout_p" or kwargs.get("training", args[2] if len(args) > 2 else True):
                used.append(float(p))
            return call(*args, **kwargs)

        return recorded

    with ExitStack() as stack:
        dropout, attention = F.dropout, F.scaled_dot_product_attention
        for holder in (F, torch):
            stack.enter_context(patch.object(holder, "dropout", recording(dropout, "p", 1)))
        stack.enter_context(
            patch.object(F, "scaled_dot_product_attention", recording(attention, "dropout_p", 4))
        )
        yield used


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if part is not None:
            yield from _parts(part)


def _is_number(value: Any) -> bool:
    """None stands for another field's value (`classifier_dropout`)."""
    return value is None or (isinstance(value, float | int) and not isinstance(value, bool))
