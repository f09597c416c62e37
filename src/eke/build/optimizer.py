"""Optimizers, with weight decay on matrices only."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from eke.plan import Plan
from eke.schema import SGD, Adafactor, AdamW

Groups = list[dict[str, Any]]


def build_optimizer(plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    """The planned optimizer over the trainable parameters of `model`."""
    groups = parameter_groups(model, plan.config.optimizer.weight_decay)
    return BUILDERS[plan.config.optimizer.option](plan, groups)


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Two groups: matrices are decayed; biases and normalisation weights, the vectors, are not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(plan: Plan, groups: Groups) -> torch.optim.Optimizer:
    config, implementation = plan.config.optimizer, plan.compute.optimizer_implementation
    assert isinstance(config, AdamW)
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        foreach=implementation == "foreach",
        fused=implementation == "fused",
    )


def _adafactor(plan: Plan, groups: Groups) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor as TransformersAdafactor

    config = plan.config.optimizer
    assert isinstance(config, Adafactor)
    optimizer: torch.optim.Optimizer = TransformersAdafactor(
        groups,
        lr=config.lr,
        eps=(config.eps1, 1e-3),  # the second is read only with scale_parameter, which is off
        clip_threshold=config.clip_threshold,
        decay_rate=config.decay_rate,
        scale_parameter=False,
        relative_step=False,
        warmup_init=False,
    )
    return optimizer


def _sgd(plan: Plan, groups: Groups) -> torch.optim.Optimizer:
    config = plan.config.optimizer
    assert isinstance(config, SGD)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)


BUILDERS: dict[str, Callable[[Plan, Groups], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw_forloop": _adamw,
    "adamw_foreach": _adamw,
    "adamw_fused": _adamw,
    "adafactor": _adafactor,
    "sgd": _sgd,
}
"""Option of the group `optimizer` -> builder."""
