"""Optimizer step with forward and backward passes, used by runs and memory traces."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eke.training.batches.batches import CacheRelease, MicroBatch
from eke.training.model.loss import LossFunction, total_loss
from eke.training.model.number_formats import Formats
from eke.training.optimizer.update import Update


class Answering(Protocol):
    """What takes part in an evaluation."""

    model: nn.Module
    formats: Formats

    @property
    def loss(self) -> LossFunction:
        """Loss of a micro-batch, summed over its targets."""


class Stepped(Answering, Protocol):
    """What takes part in a step: the state of a run, or of a trace."""

    update: Update
    offload: AbstractContextManager[Any]
    """Context of each forward pass: where what it saves for backward is kept."""
    cache_release: CacheRelease


def take_step(
    job: Stepped,
    cut: Sequence[MicroBatch],
    num_targets: int,
    step: int,
    enter: Callable[[str], None],
) -> tuple[Tensor, Tensor | None]:
    """One optimizer step; nothing in it waits for the device.

    The gradient is that of the mean over all `num_targets` of the global batch, so that it is the
    same however the batch is `cut` into this rank's micro-batches. `enter` is called when a phase
    begins.

    Returns:
        The loss summed over this rank's targets, of a mix with that of each source behind it, and
        the norm of the whole gradient, on the device; None if the norm is not needed.
    """
    total: Tensor | None = None
    with job.formats.copies:
        for number, batch in enumerate(cut, start=1):
            with job.update.exchange(last=number == len(cut)):
                enter("forward")
                with job.formats.autocast(), job.offload:
                    loss = job.loss(job.model, batch)
                job.cache_release.after_forward(step)
                enter("backward")
                job.update.backward(total_loss(loss), num_targets)
            total = loss.detach() if total is None else total + loss.detach()
            del loss
    assert total is not None, "a rank without samples has a placeholder"
    enter("optimizer")
    return total, job.update.apply()


@torch.no_grad()
def add_evaluation(job: Answering, batch: MicroBatch, total: Tensor) -> None:
    """Add the loss of one micro-batch of evaluation, summed over its targets, to `total`."""
    with job.formats.eval_autocast():
        total += job.loss(job.model, batch)
