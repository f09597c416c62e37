"""NVIDIA apex: built from its repository, for CUDA only."""

import torch

from eke.config.schema import AdamW
from eke.plan.planner import Plan
from eke.training.optimizer.groups import Groups


def adamw_apex_fused(plan: Plan, groups: Groups) -> torch.optim.Optimizer:
    """AdamW in one kernel per list of tensors."""
    from apex.optimizers import FusedAdam

    config = plan.config.optimizer
    assert isinstance(config, AdamW)
    optimizer: torch.optim.Optimizer = FusedAdam(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, adam_w_mode=True
    )
    return optimizer
