"""The learning rate of a step."""

from torch import Tensor
from torch.optim import Optimizer

RATIO = "lr_ratio"
"""Key of a parameter group: its learning rate as a multiple of the optimizer's."""


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Give each group its rate: in place where it is a tensor, which compiled steps have read."""
    for group in optimizer.param_groups:
        rate = learning_rate * group.get(RATIO, 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
