"""Which builder makes which option."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from eke.plan.planner import Plan
from eke.training.model.fp32_master_weights import build_with_master
from eke.training.optimizer import apex
from eke.training.optimizer import bitsandbytes as bits
from eke.training.optimizer import galore_apollo as lowrank
from eke.training.optimizer import schedule_free as averaged
from eke.training.optimizer import torch_optim as torchs
from eke.training.optimizer import torchao as ao
from eke.training.optimizer.groups import Groups, parameter_groups


def build_optimizer(plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    """The planned optimizer over the trainable parameters of `model`, which is not wrapped yet."""
    groups = parameter_groups(model, plan.config.optimizer.weight_decay)
    build = BUILDERS[plan.config.optimizer.option]
    if plan.compute.master and plan.deepspeed is None:  # which has copies of its own
        return build_with_master(groups, partial(build, plan))
    return build(plan, groups)


BUILDERS: dict[str, Callable[[Plan, Groups], torch.optim.Optimizer]] = {
    "adamw": torchs.adamw,
    "adamw_forloop": torchs.adamw,
    "adamw_foreach": torchs.adamw,
    "adamw_fused": torchs.adamw,
    "adamw_apex_fused": apex.adamw_apex_fused,
    "adamw_8bit": bits.adamw_8bit,
    "paged_adamw_8bit": bits.adamw_8bit,
    "adamw_torchao_8bit": ao.adamw_8bit,
    "adamw_torchao_4bit": ao.adamw_4bit,
    "adamw_bf16_sr": ao.adamw_bf16_sr,
    "adafactor": torchs.adafactor,
    "lion": bits.lion,
    "lion_8bit": bits.lion_8bit,
    "sgd": torchs.sgd,
    "muon": torchs.muon,
    "schedule_free": averaged.schedule_free,
    "apollo": lowrank.apollo,
    "galore": lowrank.galore,
}
"""Option of the group `optimizer` -> builder."""
