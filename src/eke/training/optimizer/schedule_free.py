"""Schedule-Free AdamW (schedulefree 1.4 tested)."""

import torch

from eke.config.schema import ScheduleFree
from eke.plan.planner import Plan
from eke.training.optimizer.groups import Groups


def schedule_free(plan: Plan, groups: Groups) -> torch.optim.Optimizer:
    """Schedule-Free AdamW, in training mode.

    Its own warm-up stays off: the plan's gives it the same learning rates, by which it weights its
    average.
    """
    from schedulefree import AdamWScheduleFree

    config = plan.config.optimizer
    assert isinstance(config, ScheduleFree)
    optimizer: torch.optim.Optimizer = AdamWScheduleFree(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        warmup_steps=0,
        r=config.average_power,
        weight_lr_power=config.lr_power,
    )
    optimizer.train()  # type: ignore[attr-defined]  # schedulefree 1.4
    return optimizer
