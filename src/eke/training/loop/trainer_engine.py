"""Hugging Face Trainer engine: eke's data, loss, number formats and clipping through hooks.

`Trainer.compute_loss` is replaced since it depends on how a batch is cut: if the model's forward
pass takes `**kwargs` and its loss ignores `num_items_in_batch`, four accumulation steps report four
times the loss and two ranks twice (transformers 5.23; tests/equivalence/test_engines.py).

Trainer's own: the loop over micro-batches, Accelerate's data parallelism and backward pass, the
optimizer's step, the schedule's steps, callbacks, and every argument given as `trainer.extra`.
eke's, through Trainer's hooks: model, optimizer, data order, number formats, loss, clipping,
evaluation, checkpoints, records. A comparison of the two engines compares loops and nothing else.
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
from eke.training.model.unused import routed_parents
from eke.training.observe.effective import closer_look
from eke.training.observe.libraries import note_trainer
from eke.training.optimizer.update import PlainUpdate, set_learning_rate


def render_arguments(plan: Plan, paths: RunPaths, routed: bool = False) -> dict[str, Any]:
    """What the plan and `trainer.extra` say to Trainer, by argument.

    What eke does itself is switched off: saving, evaluating, logging, reporting, and reading every
    loss to see whether it is a number, which waits for the device in each micro-batch.
    """
    config = plan.config
    return {
        "output_dir": str(paths.folder),
        "max_steps": plan.steps.total,
        "per_device_train_batch_size": plan.batch.per_device,
        "per_device_eval_batch_size": plan.batch.eval_per_device,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "learning_rate": config.optimizer.lr,
        "weight_decay": config.optimizer.weight_decay,
        "max_grad_norm": config.train.max_grad_norm or 0.0,  # Trainer's way to say: do not clip
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
    """Trainer's arguments, checked by its own code; RunError: it refuses them."""
    try:
        arguments = TrainingArguments(**render_arguments(plan, paths, routed))
    except (ValueError, TypeError, KeyError, ImportError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(f"engine = trainer: transformers refuses its arguments: {reason}") from error
    # One process has one GPU: Trainer would wrap all visible ones in DataParallel.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


Inputs = dict[str, Any]
"""A micro-batch in Trainer: the model's arguments by name, and the `MicroBatch` itself."""

MICRO_BATCH = "micro_batch"


class Steps:
    """The optimizer step in progress, and what is kept of it.

    Trainer counts micro-batches, and expects the same number of them in every step of its one long
    epoch. A last, shorter step of eke's epochs is filled up with micro-batches without targets.
    """

    def __init__(self, job: TrainingState, update: PlainUpdate, look: ExitStack) -> None:
        self.job = job
        self.update = update
        self.look = look
        self.between = BetweenSteps(job)
        self.batches = job.data.train_steps(job.start_step, job.ranks.rank)
        self.step = job.start_step
        """Optimizer step in progress, counted from 0."""
        self.totals = StepTotals(1, 0, 0)
        self.loss = torch.zeros((), device=job.device)
        """Of the step so far, summed over this rank's targets."""
        self.grad_norm: Tensor | None = None
        self.copies = ExitStack()
        """Holds the weights to compute with, from the first micro-batch of a step to its last."""
        self.learning_rate = 0.0
        """As the optimizer had it in this step."""
        self.stopped: Stopped | None = None
        """Why training is to end before its last step."""

    def take(self) -> list[Inputs]:
        """Begin a step: this rank's micro-batches of it, always `accumulation` of them."""
        job = self.job
        self.look.enter_context(closer_look(job, self.step - job.start_step))
        cut, self.totals = next_step(job, self.batches)
        self.loss = torch.zeros((), device=job.device)
        set_learning_rate(job.optimizer, job.plan.config.optimizer.lr * job.multiplier(self.step))
        self.copies.enter_context(job.formats.copies)
        cut += [cut[-1].without_targets()] * (job.plan.batch.accumulation - len(cut))
        return [{**batch.inputs, MICRO_BATCH: batch} for batch in cut]

    def clip(self) -> Tensor | None:
        """Clip as planned; the norm before, on the device."""
        self.grad_norm = self.update.clip()
        return self.grad_norm

    def finish(self) -> None:
        """The optimizer has taken its step: note it, and do what is due between steps."""
        noted = self.loss, self.grad_norm, self.learning_rate, self.totals
        self.job.meter.end_step(self.step, *noted)
        self.look.close()
        self.step += 1
        try:
            self.between.finish(self.step - 1, self.totals)
        except Stopped as stopped:
            self.stopped = stopped


class StepCallback(TrainerCallback):  # type: ignore[misc]  # transformers 5.23 has no types for mypy
    """Evaluates, notes, writes, saves and stops where eke's own loop does."""

    def __init__(self, steps: Steps, trainer: Trainer) -> None:
        self.steps = steps
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Continue counting where the checkpoint stands; evaluate before the first step."""
        job = self.steps.job
        job.model = self.trainer.model_wrapped
        state.global_step = job.start_step
        note_trainer(job, self.trainer)
        if job.start_step == 0:
            evaluate_at(job, 0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The weights of the optimizer, and the learning rate of this step as it has it."""
        self.steps.copies.close()
        self.steps.learning_rate = float(self.steps.job.optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Finish a step; on a stop request Trainer ends its loop in order."""
        self.steps.finish()
        if self.steps.stopped or self.steps.between.is_over:
            control.should_training_stop = True


class PlanTrainer(Trainer):  # type: ignore[misc]  # transformers 5.23 has no types for mypy
    """Trainer over the steps of one job."""

    loss_is_scaled_for_ga = True
    """Read by transformers 5.23; earlier ones look at `model_accepts_loss_kwargs`."""

    def __init__(self, steps: Steps, arguments: TrainingArguments) -> None:
        job = steps.job
        self.steps = steps
        for group in job.optimizer.param_groups:
            group["initial_lr"] = job.plan.config.optimizer.lr
        schedule = LambdaLR(job.optimizer, job.multiplier, last_epoch=job.start_step - 1)
        super().__init__(
            model=job.model,
            args=arguments,
            callbacks=[StepCallback(steps, self)],
            optimizers=(job.optimizer, schedule),
        )
        self.remove_callback(PrinterCallback)  # prints into the log what the record has
        # Accelerate scales losses on a GPU only; given a scaler, it does so on a CPU as well.
        self.accelerator.scaler = job.formats.scaler
        self.model_accepts_loss_kwargs = True

    def get_train_dataloader(self) -> Iterator[Any]:
        """The order of the plan; without a length, so that all steps are one epoch to Trainer."""
        return self.steps.batches

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], int]:
        """The micro-batches of one optimizer step, and the targets of the global batch."""
        return self.steps.take(), self.steps.totals.num_targets

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
        job = self.steps.job
        enter(job, "forward")
        with job.offload:
            smoothing = self.args.label_smoothing_factor
            loss = job.loss(model, inputs[MICRO_BATCH], smoothing=smoothing)
        job.cache_release.after_forward(self.steps.step)
        job.meter.enter("backward")
        self.steps.loss = self.steps.loss + loss.detach()
        # Ranks average their gradients where they should sum them.
        return total_loss(loss) * (job.ranks.world_size / self.steps.totals.num_targets)

    def training_step(
        self, model: nn.Module, inputs: Inputs, num_items_in_batch: int | None = None
    ) -> Tensor:
        """Run Trainer's step, then mark the end of the last backward pass."""
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            enter(self.steps.job, "optimizer")
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor | None:
        return self.steps.clip()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor | None:
        """Return the gradient norm; called in every step after (or instead of) clipping."""
        return self.steps.clip() if grad_norm is None else grad_norm


def train_with_trainer(job: TrainingState) -> None:
    """As `eke.training.loop.loop.train`; RunError: Trainer refuses arguments or the update."""
    if type(job.update) is not PlainUpdate:
        why = f"it cannot take the steps of {type(job.update).__name__}"
        fix = "which shares out the training state\n  -> engine=loop"
        raise RunError(f"engine = trainer: {why}, {fix}")
    with ExitStack() as look:  # cleans up when a step fails
        steps = Steps(job, job.update, look)
        random = capture_random_state()  # Trainer seeds anew; a checkpoint has brought its own
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
