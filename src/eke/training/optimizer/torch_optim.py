"""Optimizers of PyTorch itself, and of transformers."""

import torch

from eke.common.errors import RunError
from eke.config.schema import SGD, Adafactor, AdamW, AdjustLR, Muon
from eke.models.sizes import Role
from eke.plan.planner import Plan
from eke.training.distributed.operators import load_adam
from eke.training.optimizer.composite import Composite
from eke.training.optimizer.groups import Groups, split
from eke.training.optimizer.rate import RATIO


def adamw(plan: Plan, groups: Groups) -> torch.optim.Optimizer:
    """AdamW in the implementation that was planned."""
    config, implementation = plan.config.optimizer, plan.compute.optimizer_implementation
    assert isinstance(config, AdamW)
    if implementation == "deepspeed_cpu":
        return deepspeed_cpu_adam(config, groups)
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        foreach=implementation == "foreach",
        fused=implementation == "fused",
    )


def deepspeed_cpu_adam(config: AdamW, groups: Groups) -> torch.optim.Optimizer:
    """AdamW in vector instructions of the host; compiled at its first use on a machine."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    load_adam()
    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        adamw_mode=True,
    )
    return optimizer


def adafactor(plan: Plan, groups: Groups) -> torch.optim.Optimizer:
    """Transformers' Adafactor with a fixed learning rate."""
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


def sgd(plan: Plan, groups: Groups) -> torch.optim.Optimizer:
    """Stochastic gradient descent, its weight decay apart from the momentum.

    torch's own adds the decay to the gradient, where the momentum keeps it (Loshchilov and Hutter
    2017, arXiv:1711.05101, algorithm 1).
    """
    config = plan.config.optimizer
    assert isinstance(config, SGD)
    apart = [{**g, "weight_decay": 0.0, DECAY: g["weight_decay"]} for g in groups]
    made = torch.optim.SGD(apart, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)
    made.register_step_pre_hook(_decay)
    return made


DECAY = "decoupled_weight_decay"
"""Key of a group: what of a weight goes in a step, times the learning rate."""


@torch.no_grad()
def _decay(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        weights = [p for p in group["params"] if p.grad is not None]
        if group[DECAY] and weights:
            torch._foreach_mul_(weights, 1 - group["lr"] * group[DECAY])


def muon(plan: Plan, groups: Groups) -> torch.optim.Optimizer:
    """Muon for the matrices inside Transformer layers, fused AdamW for everything else.

    Raises:
        RunError: no matrix inside a Transformer layer is trained.
    """
    config = plan.config.optimizer
    assert isinstance(config, Muon)
    hidden, rest = split(groups, Role.hidden)
    if not hidden:
        raise RunError(
            "optimizer = muon: no matrix inside a Transformer layer is trained, and Muon is for "
            "those alone\n  -> optimizer=adamw"
        )
    # torch's own default of ns_coefficients; None is `original`.
    adjust = None if config.adjust_lr is AdjustLR.original else config.adjust_lr.value
    parts: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            hidden,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            ns_steps=config.ns_steps,
            adjust_lr_fn=adjust,
        )
    ]
    ratio = 1.0 if config.adamw_lr is None else config.adamw_lr / config.lr
    if rest:
        parts.append(
            torch.optim.AdamW(
                [{**group, RATIO: ratio} for group in rest],
                lr=config.lr * ratio,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                fused=True,
            )
        )
    return Composite(parts)
