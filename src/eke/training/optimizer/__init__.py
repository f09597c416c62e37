"""Optimizers: builders, learning-rate schedules, parameter groups and the update of a step.

Libraries that not everybody has are imported inside the builders.
"""

from eke.training.optimizer.build_optimizer import (
    build_optimizer,
    evaluation_weights,
    restore_training_weights,
    state_tensors,
)
from eke.training.optimizer.update import Groups, parameter_groups, set_learning_rate

__all__ = [
    "Groups",
    "build_optimizer",
    "evaluation_weights",
    "parameter_groups",
    "restore_training_weights",
    "set_learning_rate",
    "state_tensors",
]
