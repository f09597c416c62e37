"""How the ranks of a run share its model: copies of it, or parts."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import nn

from eke.config.schema import FSDP
from eke.plan.planner import Plan
from eke.training.checkpoint.sharded import ShardedUpdate
from eke.training.distributed.data_parallel import build_data_parallel
from eke.training.distributed.ranks import Ranks
from eke.training.distributed.sharding import shard_model
from eke.training.model.loss import LossFunction
from eke.training.model.precision import Formats
from eke.training.optimizer.in_backward import InBackwardUpdate
from eke.training.optimizer.update import PlainUpdate, Update


def share_model(
    plan: Plan, accelerator: Accelerator, model: nn.Module, device: torch.device, ranks: Ranks
) -> nn.Module:
    """The model as it is to be called; before there is an optimizer over its parameters."""
    if plan.deepspeed is not None:
        return model  # its engine shares it out, later
    if ranks.world_size > 1 and plan.config.distributed.option in SHARDERS:
        SHARDERS[plan.config.distributed.option](plan, model, device)
        return model
    if plan.config.engine.option == "trainer":
        return model  # Trainer does that itself, with an Accelerator of its own
    prepared: nn.Module = accelerator.prepare_model(model)
    return prepared


def share_loss(
    plan: Plan, model: nn.Module, loss: LossFunction, formats: Formats
) -> tuple[nn.Module, LossFunction]:
    """The model as the loop calls it, and the loss: computed on each device that this rank feeds.

    Where one rank feeds several devices, model and loss become one module.
    """
    if plan.config.distributed.option == "dp":
        return build_data_parallel(plan, model, loss, formats)
    return model, loss


def share_update(plan: Plan, plain: PlainUpdate, model: nn.Module, ranks: Ranks) -> Update:
    """The optimizer step that goes with it.

    Args:
        plan: the run.
        plain: the step of a process that has it all.
        model: without wrappers.
        ranks: those that really are there.
    """
    config = plan.config.distributed
    if plan.config.memory.optimizer_in_backward:
        return InBackwardUpdate(plain.optimizer, plain.parameters, plain.knows_norm)
    if ranks.world_size > 1 and isinstance(config, FSDP):
        return ShardedUpdate(plain, model, config.exchange)
    return plain


SHARDERS: dict[str, Callable[[Plan, nn.Module, torch.device], None]] = {"fsdp": shard_model}
"""Option of the group `distributed` that cuts the model -> how; the others copy it."""
