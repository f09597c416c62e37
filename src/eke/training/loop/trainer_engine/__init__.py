"""engine=trainer: Hugging Face Trainer takes the steps of an eke job.

Trainer's own: the loop over micro-batches, Accelerate's data parallelism and backward pass, the
optimizer's step, the schedule's steps, callbacks, and every argument given as `trainer.extra`.
eke's, through Trainer's hooks: model, optimizer, data order, number formats, loss, clipping,
evaluation, checkpoints, records. A comparison of the two engines compares loops and nothing else.
"""

from contextlib import ExitStack

from eke.common.errors import RunError
from eke.training.loop.random_state import capture_random_state, restore_random_state
from eke.training.loop.state import Job
from eke.training.loop.stop import Interrupted
from eke.training.loop.trainer_engine.arguments import build_arguments
from eke.training.loop.trainer_engine.steps import Steps
from eke.training.loop.trainer_engine.trainer import PlanTrainer
from eke.training.model.experts import routed_parents
from eke.training.optimizer.update import PlainUpdate

__all__ = ["train_with_trainer"]


def train_with_trainer(job: Job) -> None:
    """Train to the last step, evaluating, saving and writing on the way.

    Raises:
        Stopped: a signal asked for it; the checkpoint is complete.
        Diverged: a loss is not finite.
        RunError: Trainer does not take the arguments, or cannot take this job's steps.
    """
    if not isinstance(job.update, PlainUpdate):
        raise RunError(
            f"engine = trainer: it cannot take the steps of {type(job.update).__name__}, which "
            "shares out the training state\n  -> engine=loop"
        )
    with ExitStack() as look:  # what is looked at closely is left in order when a step fails
        steps = Steps(job, job.update, look)
        random = capture_random_state()  # Trainer seeds anew; a checkpoint has brought its own
        routed = bool(routed_parents(job.bare_model))
        trainer = PlanTrainer(steps, build_arguments(job.plan, job.paths, routed))
        restore_random_state(random)
        if job.start_step < job.plan.steps.total:
            try:
                trainer.train()
            except Interrupted:
                steps.between.give_up(steps.step)
    if steps.stopped:
        raise steps.stopped
