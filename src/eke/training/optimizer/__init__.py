"""Optimizers: one builder per option, a file per library, and what the loop must know of them.

Libraries that not everybody has are imported inside the builders.
"""

from eke.training.optimizer.build_optimizer import (
    BUILDERS,
    build_optimizer,
    evaluation_weights,
    restore_training_weights,
    state_tensors,
)
from eke.training.optimizer.update import Groups, parameter_groups, set_learning_rate

__all__ = [
    "BUILDERS",
    "Groups",
    "build_optimizer",
    "evaluation_weights",
    "parameter_groups",
    "restore_training_weights",
    "set_learning_rate",
    "state_tensors",
]
