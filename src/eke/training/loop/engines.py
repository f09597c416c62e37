"""Which training loop runs a job."""

from collections.abc import Callable

from eke.training.checkpoint.merged import save_merged
from eke.training.loop import loop
from eke.training.loop.state import Job
from eke.training.model.sdpa_backend import pinned_backend


def train(job: Job) -> None:
    """Train to the last step with the planned engine and attention kernel.

    Raises:
        Stopped: a signal asked for it; the checkpoint is complete.
        Diverged: a loss is not finite.
        RunError: the attention kernel that was asked for does not take this model's inputs.
    """
    with pinned_backend(job.plan):
        ENGINES[job.plan.config.engine.option](job)
    save_merged(job)


def train_with_trainer(job: Job) -> None:
    """Train with Hugging Face Trainer, which takes a second to import."""
    from eke.training.loop.trainer_engine import train_with_trainer

    train_with_trainer(job)


ENGINES: dict[str, Callable[[Job], None]] = {"loop": loop.train, "trainer": train_with_trainer}
"""Option of the group `engine` -> what trains to the last step."""
