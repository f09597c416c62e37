"""Weights that are trained and weights that are evaluated, where these are not the same.

Schedule-Free takes gradients between its average and its fast weights; the average is what counts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from eke.training.distributed.sharding import cut_like


@contextmanager
def evaluation_weights(optimizer: Optimizer) -> Iterator[list[Tensor]]:
    """Context in which the model has the weights to evaluate and to export.

    Afterwards it has its training weights again, to the last bit: they wait in the host's memory,
    since going there and back by formula rounds.

    Yields:
        The training weights in the order of the parameter groups, on the host; nothing when they
        are the same.
    """
    switch = getattr(optimizer, "eval", None)
    if switch is None:
        yield []
        return
    kept = [p.detach().to("cpu", copy=True) for p in _parameters(optimizer)]
    switch()
    try:
        yield kept
    finally:
        optimizer.train()  # type: ignore[attr-defined]  # schedulefree 1.4
        restore_training_weights(optimizer, kept)


@torch.no_grad()
def restore_training_weights(optimizer: Optimizer, kept: Sequence[Tensor]) -> None:
    """Put back what `evaluation_weights` yielded; whole tensors where parameters are cut, too."""
    if kept:
        for parameter, value in zip(_parameters(optimizer), kept, strict=True):
            parameter.copy_(cut_like(value, parameter))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
