"""Facts that options decide, so that other modules do not ask for options by name."""

from dataclasses import dataclass

from eke.config.schema.data import Data, ProblemType, Task


@dataclass(frozen=True)
class Targets:
    """Targets of the task."""

    option: str
    per_token: bool
    """Whether labels are tokens. False: one label per sample."""
    is_causal: bool
    """Whether each token of the input predicts the next one."""
    length: int
    """Tokens of a separate target sequence, 0 without one."""
    mask_frac: float
    """Share of tokens that are masked and predicted, 0 without masks."""
    num_labels: int
    """Number of classes, 0 if labels are tokens."""
    problem: ProblemType

    @property
    def is_generated(self) -> bool:
        """Whether a trained model can generate targets, token by token."""
        return self.is_causal or self.length > 0


def targets_of(task: Task, data: Data) -> Targets:
    """Return the facts about targets."""
    length = (getattr(task, "target_len", None) or data.seq_len) if task.has_target else 0
    counts = getattr(task, "mask_frac", 0.0), getattr(task, "num_labels", 0)
    return Targets(task.option, task.per_token, task.is_causal, length, *counts, task.problem)
