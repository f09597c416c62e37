"""Trainer with eke's data, loss, number formats and clipping, through the hooks it has for them.

Its own `compute_loss` is replaced since it depends on how a batch is cut: where the model's forward
pass takes `**kwargs` and its loss ignores `num_items_in_batch`, four accumulation steps report four
times the loss and two ranks twice (transformers 5.23; tests/equivalence/test_engines.py).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainingArguments

from eke.training.batches.batches import MicroBatch
from eke.training.loop.loop import enter
from eke.training.loop.state import Job
from eke.training.loop.trainer_engine.callback import StepCallback
from eke.training.loop.trainer_engine.steps import Inputs, Steps, as_batch


class PlanTrainer(Trainer):  # type: ignore[misc]  # transformers 5.23 has no types for mypy
    """Trainer over the steps of one job."""

    loss_is_scaled_for_ga = True
    """Read by transformers 5.23; earlier ones look at `model_accepts_loss_kwargs`."""

    def __init__(self, steps: Steps, arguments: TrainingArguments) -> None:
        job = steps.job
        self.steps = steps
        super().__init__(
            model=job.model,
            args=arguments,
            callbacks=[StepCallback(steps, self)],
            optimizers=(job.optimizer, build_lr_scheduler(job)),
        )
        self.remove_callback(PrinterCallback)  # prints into the log what the record has
        # Accelerate scales losses on a GPU only; given a scaler, it does so on a CPU as well.
        self.accelerator.scaler = job.formats.scaler
        self.model_accepts_loss_kwargs = True

    def get_train_dataloader(self) -> Iterator[list[MicroBatch]]:
        """The order of the plan; without a length, so that all steps are one epoch to Trainer."""
        return self.steps.batches

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], int]:
        """The micro-batches of one optimizer step, and the targets of the global batch."""
        return self.steps.take(), self.steps.num_targets

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> AbstractContextManager[object]:
        """The planned number format: Accelerate's fp16 is silently float32 on a CPU."""
        return self.steps.job.formats.autocast()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: int | None = None,
    ) -> Tensor:
        """This micro-batch's share of the global batch's mean loss, ready for the backward pass."""
        meter, batch = self.steps.job.meter, as_batch(inputs)
        job = self.steps.job
        enter(job, "forward")
        with job.offload:
            smoothing = self.args.label_smoothing_factor
            share = job.loss(model, batch, smoothing) / self.steps.num_targets
        job.cache_release.after_forward(self.steps.step)
        meter.enter("backward")
        self.steps.add_loss(share)
        # Ranks average their gradients where they should sum them.
        return share * self.steps.job.ranks.world_size

    def training_step(
        self, model: nn.Module, inputs: Inputs, num_items_in_batch: int | None = None
    ) -> Tensor:
        """Trainer's own; afterwards the clock is told when the last backward pass is over."""
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self.steps.job.meter.enter("optimizer")
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor | None:
        return self.steps.clip()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor | None:
        """Asked for in every step, after clipping or instead of it."""
        return self.steps.clip() if grad_norm is None else grad_norm


def build_lr_scheduler(job: Job) -> LambdaLR:
    """The planned schedule from the job's first step on, as Trainer wants it."""
    for group in job.optimizer.param_groups:
        group["initial_lr"] = job.plan.config.optimizer.lr
    return LambdaLR(job.optimizer, job.multiplier, last_epoch=job.start_step - 1)
