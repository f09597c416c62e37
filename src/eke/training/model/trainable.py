"""The model as it is trained, before ranks share it and it has an optimizer."""

import torch
from torch import nn

from eke.plan.planner import Plan
from eke.training.batches.sources import is_packed
from eke.training.model.checkpointing import apply_checkpointing
from eke.training.model.grouped_heads import repeat_heads
from eke.training.model.kernels import apply_kernels
from eke.training.model.loss import apply_loss
from eke.training.model.masks import spare_mask_checks
from eke.training.model.model import build_model_and_report
from eke.training.model.peft import apply_peft
from eke.training.model.pretrained import LoadReport


def build_trainable(plan: Plan, device: torch.device) -> tuple[nn.Module, LoadReport]:
    """Model, adapters, kernels, loss and checkpointing of the plan, in the order that they need.

    Args:
        plan: the run.
        device: where weights are made.

    Raises:
        RunError: a checkpoint, or a technique, does not go with the model.
    """
    model, report = build_model_and_report(plan, device)
    model = apply_peft(plan, model)
    spare_mask_checks(model, packed=is_packed(plan.config))
    repeat_heads(plan)
    apply_kernels(plan, model)
    apply_loss(plan, model)
    apply_checkpointing(plan, model)
    return model, report
