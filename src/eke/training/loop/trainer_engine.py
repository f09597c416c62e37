"""Hugging Face Trainer engine with eke's data, loss, number formats and clipping as hooks.

Trainer provides the loop over micro-batches, Accelerate, the optimizer and schedule steps,
callbacks, and `trainer.extra`. The rest comes from eke, so that comparisons only compare loops.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from eke.common.errors import RunError
from eke.common.paths import RunPaths
from eke.plan.planner import Plan
from eke.training.distributed.ranks import StepTotals
from eke.training.loop.loop import BetweenSteps, enter, evaluate_at, next_step
from eke.training.loop.meter import capture_random_state, restore_random_state
from eke.training.loop.stop import Interrupted, Stopped
from eke.training.loop.training_state import TrainingState
from eke.training.model.loss import total_loss
from eke.training.model.model_checks import routed_parents
from eke.training.observe.observe_run import profile_step
from eke.training.observe.record_settings import note_trainer
from eke.training.optimizer.update import PlainUpdate, set_learning_rate


def render_arguments(plan: Plan, paths: RunPaths, routed: bool = False) -> dict[str, Any]:
    """Return Trainer's arguments from the plan and `trainer.extra`."""
    config = plan.config
    # Disable Trainer's own saving, evaluation, logging and reporting. logging_nan_inf_filter would
    # wait for the device in each micro-batch.
    return {
        "output_dir": str(paths.folder),
        "max_steps": plan.steps.total,
        "per_device_train_batch_size": plan.batch.per_device,
        "per_device_eval_batch_size": plan.batch.eval_per_device,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "learning_rate": config.optimizer.lr,
        "weight_decay": config.optimizer.weight_decay,
        "max_grad_norm": config.train.max_grad_norm or 0.0,  # 0: no clipping
        "seed": config.seed,
        "use_cpu": plan.device.kind == "cpu",
        "dataloader_num_workers": config.dataloader.workers,
        "dataloader_pin_memory": plan.compute.pin_memory,
        "remove_unused_columns": False,
        "ddp_find_unused_parameters": routed,
        "ddp_broadcast_buffers": False,
        "report_to": "none",
        "logging_strategy": "no",
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "log_level": "error",
        **config.trainer.extra,
    }


def build_arguments(plan: Plan, paths: RunPaths, routed: bool = False) -> TrainingArguments:
    """Return Trainer's validated arguments. Raises RunError if Trainer rejects them."""
    try:
        arguments = TrainingArguments(**render_arguments(plan, paths, routed))
    except (ValueError, TypeError, KeyError, ImportError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(f"engine = trainer: transformers rejects its arguments: {reason}") from error
    # Each process has one GPU. Trainer would wrap all visible GPUs in DataParallel.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


_Inputs = dict[str, Any]
"""Micro-batch in Trainer: the model's arguments by name, and the `MicroBatch`."""

MICRO_BATCH = "micro_batch"


class _Steps(TrainerCallback):  # type: ignore[misc]  # transformers 5.23 has no types for mypy
    """Current optimizer step, and callback that evaluates, saves and stops as eke's loop does."""

    trainer: Trainer

    def __init__(self, job: TrainingState, update: PlainUpdate, look: ExitStack) -> None:
        self.job = job
        self.update = update
        self.look = look
        self.between = BetweenSteps(job)
        self.batches = job.data.train_steps(job.start_step, job.ranks.rank)
        self.step = job.start_step
        """Current optimizer step, counted from 0."""
        self.totals = StepTotals(1, 0, 0)
        self.loss = torch.zeros((), device=job.device)
        """Loss of the current step so far, summed over this rank's targets."""
        self.grad_norm: Tensor | None = None
        self.copies = ExitStack()
        """Contexts of the compute copies of weights, open during all micro-batches of a step."""
        self.learning_rate = 0.0
        """Learning rate of the optimizer in this step."""
        self.stopped: Stopped | None = None
        """Reason to end training before its last step."""

    def take(self) -> list[_Inputs]:
        """Begin a step and return its micro-batches, with empty ones up to `accumulation`."""
        job = self.job
        self.look.enter_context(profile_step(job, self.step - job.start_step))
        cut, self.totals = next_step(job, self.batches)
        self.loss = torch.zeros((), device=job.device)
        set_learning_rate(job.optimizer, job.plan.config.optimizer.lr * job.multiplier(self.step))
        self.copies.enter_context(job.formats.copies)
        cut += [cut[-1].without_targets()] * (job.plan.batch.accumulation - len(cut))
        return [{**batch.inputs, MICRO_BATCH: batch} for batch in cut]

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Set the step count of the checkpoint, and evaluate before the first step."""
        job = self.job
        job.model = self.trainer.model_wrapped
        state.global_step = job.start_step
        note_trainer(job, self.trainer)
        if job.start_step == 0:
            evaluate_at(job, 0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the optimizer's weights and record the learning rate of this step."""
        self.copies.close()
        self.learning_rate = float(self.job.optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Record the step and do what is due. After a stop request Trainer leaves its loop."""
        noted = self.loss, self.grad_norm, self.learning_rate, self.totals
        self.job.meter.end_step(self.step, *noted)
        self.look.close()
        self.step += 1
        try:
            self.between.finish(self.step - 1, self.totals)
        except Stopped as stopped:
            self.stopped = stopped
        if self.stopped or self.between.is_over:
            control.should_training_stop = True


class PlanTrainer(Trainer):  # type: ignore[misc]  # transformers 5.23 has no types for mypy
    """Trainer for the steps of one run."""

    loss_is_scaled_for_ga = True
    """True if the loss is divided by accumulation steps (transformers 5.23)."""

    def __init__(self, steps: _Steps, arguments: TrainingArguments) -> None:
        job = steps.job
        self.steps, steps.trainer = steps, self
        for group in job.optimizer.param_groups:
            group["initial_lr"] = job.plan.config.optimizer.lr
        schedule = LambdaLR(job.optimizer, job.multiplier, last_epoch=job.start_step - 1)
        super().__init__(
            model=job.model,
            args=arguments,
            callbacks=[steps],
            optimizers=(job.optimizer, schedule),
        )
        self.remove_callback(PrinterCallback)  # the record has the values that it prints
        # Accelerate scales losses only on a GPU, unless it is given a scaler.
        self.accelerator.scaler = job.formats.scaler
        self.model_accepts_loss_kwargs = True

    def get_train_dataloader(self) -> Iterator[Any]:
        """Return steps in the order of the plan, without a length, as one epoch for Trainer."""
        return self.steps.batches

    def get_batch_samples(self, *_: Any) -> tuple[list[_Inputs], int]:
        """Return micro-batches of one optimizer step, and the targets of the global batch."""
        return self.steps.take(), int(self.steps.totals.num_targets)

    def autocast_smart_context_manager(self, *_: Any) -> AbstractContextManager[object]:
        """Return the planned autocast context."""
        # Accelerate's fp16 on a CPU is float32 without a warning.
        return self.steps.job.formats.autocast()

    def compute_loss(self, model: nn.Module, inputs: _Inputs, **_: Any) -> Tensor:
        """Return this micro-batch's share of the global batch's mean loss, for backward."""
        # Trainer's own depends on the division of a batch: if the model's forward pass takes
        # `**kwargs` and its loss ignores `num_items_in_batch`, four accumulation steps report four
        # times the loss and two ranks twice (transformers 5.23; tests/equivalence/test_engines.py).
        job = self.steps.job
        enter(job, "forward")
        with job.offload:
            smoothing = self.args.label_smoothing_factor
            loss = job.loss(model, inputs[MICRO_BATCH], smoothing=smoothing)
        job.cache_release.after_forward(self.steps.step)
        job.meter.enter("backward")
        self.steps.loss = self.steps.loss + loss.detach()
        # Compensate for ranks that average their gradients instead of summing them.
        return total_loss(loss) * (job.ranks.world_size / self.steps.totals.num_targets)

    def training_step(self, *inputs: Any) -> Tensor:
        """Run Trainer's step, then mark the end of the last backward pass."""
        loss: Tensor = super().training_step(*inputs)
        if self.accelerator.sync_gradients:
            enter(self.steps.job, "optimizer")
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor | None:
        """Clip gradients as planned and return their norm before, on the device."""
        self.steps.grad_norm = self.steps.update.clip()
        return self.steps.grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor | None:
        """Return the gradient norm. Called in every step, after or instead of clipping."""
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm


def train_with_trainer(job: TrainingState) -> None:
    """Train like `eke.training.loop.loop.train`. RunError: Trainer rejects arguments or update."""
    if type(job.update) is not PlainUpdate:
        why = f"does not support {type(job.update).__name__}, which shards the training state"
        raise RunError(f"engine = trainer: {why}\n  -> engine=loop")
    with ExitStack() as look:  # cleans up when a step fails
        steps = _Steps(job, job.update, look)
        random = capture_random_state()  # Trainer seeds again, after a checkpoint was restored
        routed = bool(routed_parents(job.bare_model))
        trainer = PlanTrainer(steps, build_arguments(job.plan, job.paths, routed))
        restore_random_state(random)
        if job.start_step < job.plan.steps.total:
            try:
                trainer.train()
            except Interrupted:
                steps.copies.close()
                steps.between.give_up(steps.step)
    if steps.stopped:
        raise steps.stopped
