"""One optimizer step of eke's, in the pieces between which Trainer calls its hooks."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from eke.training.batches.batches import MicroBatch
from eke.training.distributed.ranks import StepTotals
from eke.training.loop.loop import BetweenSteps, next_step
from eke.training.loop.state import Job
from eke.training.loop.stop import Stopped
from eke.training.observe.first_step_probe import closer_look
from eke.training.optimizer import set_learning_rate
from eke.training.optimizer.update import PlainUpdate

Inputs = dict[str, Any]
"""A micro-batch as Trainer passes it around: the model's tensors, and what is beside them."""

BESIDE = ("labels", "places", "num_samples", "num_targets", "num_tokens")
"""What a micro-batch has beside the arguments of the model's forward pass."""


def as_inputs(batch: MicroBatch) -> Inputs:
    """A micro-batch as Trainer passes it around."""
    others = {name: getattr(batch, name) for name in BESIDE}
    return {**batch.inputs, **others}


def as_batch(inputs: Inputs) -> MicroBatch:
    """The micro-batch behind Trainer's inputs."""
    tensors = {name: value for name, value in inputs.items() if name not in BESIDE}
    return MicroBatch(tensors, **{name: inputs[name] for name in BESIDE})


class Steps:
    """The optimizer step in progress, and what is kept of it.

    Trainer counts micro-batches, and expects the same number of them in every step of its one long
    epoch. A last, shorter step of eke's epochs is filled up with micro-batches without targets.
    """

    def __init__(self, job: Job, update: PlainUpdate, look: ExitStack) -> None:
        self.job = job
        self.update = update
        self.look = look
        self.between = BetweenSteps(job)
        self.batches = job.data.train_steps(job.start_step, job.ranks.rank)
        self.step = job.start_step
        """Optimizer step in progress, counted from 0."""
        self.totals = StepTotals(0, 0, 0)
        self.loss = torch.zeros((), device=job.device)
        """This rank's share of the step's mean loss so far."""
        self.grad_norm: Tensor | None = None
        self.learning_rate = 0.0
        """As the optimizer had it in this step."""
        self.stopped: Stopped | None = None
        """Why training is to end before its last step."""

    @property
    def num_targets(self) -> int:
        """Targets of the whole global batch: the loss is the mean over all of them."""
        return max(1, self.totals.num_targets)

    def take(self) -> list[Inputs]:
        """Begin a step: this rank's micro-batches of it, always `accumulation` of them."""
        job = self.job
        self.look.enter_context(closer_look(job, self.step - job.start_step))
        cut, self.totals = next_step(job, self.batches)
        self.loss = torch.zeros((), device=job.device)
        set_learning_rate(job.optimizer, job.plan.config.optimizer.lr * job.multiplier(self.step))
        missing = job.plan.batch.accumulation - len(cut)
        return [as_inputs(batch) for batch in cut + [cut[-1].without_targets()] * missing]

    def add_loss(self, share: Tensor) -> None:
        """One micro-batch's share of the step's mean loss is known."""
        self.loss += share.detach()

    def clip(self) -> Tensor | None:
        """Clip as planned; the norm before, on the device."""
        self.grad_norm = self.update.clip()
        return self.grad_norm

    def finish(self) -> None:
        """The optimizer has taken its step: note it, and do what is due between steps.

        Raises:
            Diverged: a loss is not finite.
        """
        totals = self.totals
        self.job.meter.end_step(
            self.step,
            self.loss,
            self.grad_norm,
            self.learning_rate,
            totals.num_samples,
            totals.num_tokens,
        )
        self.look.close()
        self.step += 1
        try:
            self.between.finish(self.step - 1, totals)
        except Stopped as stopped:
            self.stopped = stopped
