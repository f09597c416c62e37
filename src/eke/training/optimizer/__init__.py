"""Optimizers: one builder per option, a file per library, and what the loop must know of them.

Libraries that not everybody has are imported inside the builders.
"""

from eke.training.optimizer.groups import Groups, parameter_groups
from eke.training.optimizer.rate import set_learning_rate
from eke.training.optimizer.registry import BUILDERS, build_optimizer
from eke.training.optimizer.states import state_tensors
from eke.training.optimizer.weights import evaluation_weights, restore_training_weights

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
