"""What eke does when Trainer says where it is."""

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from eke.training.loop.loop import evaluate
from eke.training.loop.trainer_engine.steps import Steps
from eke.training.observe.trainer import note_trainer


class StepCallback(TrainerCallback):  # type: ignore[misc]  # transformers 5.23 has no types for mypy
    """Evaluates, notes, writes, saves and stops where eke's own loop does."""

    def __init__(self, steps: Steps, trainer: Trainer) -> None:
        self.steps = steps
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Continue counting where the checkpoint stands; evaluate before the first step."""
        job = self.steps.job
        job.model = self.trainer.model_wrapped
        state.global_step = job.start_step
        note_trainer(job, self.trainer)
        if job.start_step == 0:
            evaluate(job, 0)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The learning rate of this step, as the optimizer has it."""
        self.steps.learning_rate = float(self.steps.job.optimizer.param_groups[0]["lr"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The step is taken; Trainer ends its loop in order when eke is asked to stop."""
        self.steps.finish()
        if self.steps.stopped:
            control.should_training_stop = True
