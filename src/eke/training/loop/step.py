"""Optimizer step with forward and backward passes, used by runs and memory traces."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from eke.training.batches.batches import CacheRelease, MicroBatch
from eke.training.model.loss import LossFunction, total_loss
from eke.training.model.number_formats import Formats
from eke.training.optimizer.update import Update


class EvaluationContext(Protocol):
    """Objects of an evaluation."""

    model: nn.Module
    formats: Formats

    @property
    def loss(self) -> LossFunction:
        """Loss of a micro-batch, summed over its targets."""


class _StepContext(EvaluationContext, Protocol):
    """Objects of a step, in a run or a memory trace."""

    update: Update
    offload: AbstractContextManager[Any]
    """Context of each forward pass that selects where saved activations are kept."""
    cache_release: CacheRelease


def take_step(
    job: _StepContext,
    cut: Sequence[MicroBatch],
    num_targets: float,
    step: int,
    enter: Callable[[str], None],
) -> tuple[Tensor, Tensor | None]:
    """Take one optimizer step over the micro-batches of `cut`, without waiting for the device.

    The summed gradient is divided by `num_targets`, the targets of the global batch. `enter` is
    called with the name of each phase.

    Returns the loss summed over this rank's targets (and per source of a mix), and the norm of the
    full gradient (None if not needed), both on the device.
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
def add_evaluation(
    job: EvaluationContext,
    batch: MicroBatch,
    total: Tensor,
    model: nn.Module | None = None,
    loss: LossFunction | None = None,
) -> Any:
    """Add a micro-batch's summed loss to `total`, and return the output of `model` if given."""
    outputs: list[Any] = []

    def kept(**inputs: Any) -> Any:
        outputs.append(cast(nn.Module, model)(**inputs))
        return outputs[0]

    with job.formats.eval_autocast():
        total += (loss or job.loss)(job.model if model is None else kept, batch)
    return outputs[0] if outputs else None
