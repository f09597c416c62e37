"""How the processes of one run share its model, in Accelerate's terms."""

from collections.abc import Callable
from typing import Any

from torch import nn

from eke.plan.planner import Plan
from eke.plan.planner.deepspeed import STAGES
from eke.training.model.experts import depend_on_all, routed_parents


def build_handlers(plan: Plan) -> list[Any]:
    """Accelerate's `kwargs_handlers` for the plan's `distributed` option."""
    return BUILDERS[plan.config.distributed.option]()


def _alone() -> list[Any]:
    """Accelerate wraps nothing."""
    return []


def _ddp() -> list[Any]:
    from accelerate import DistributedDataParallelKwargs

    # Buffers of Transformers are constants; sending them with each forward pass would make ranks
    # with different numbers of micro-batches wait for each other. Gradients live in the buckets
    # that are sent: no second copy of them.
    return [DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)]


def expect_unreached(plan: Plan, model: nn.Module, accelerator: Any) -> None:
    """Let ranks train experts that the micro-batch of some of them does not reach.

    DDP looks for them after each forward pass. FSDP and ZeRO exchange what all ranks have a
    gradient of: there every expert has one, of zero if need be.

    Args:
        plan: the run.
        model: before it is shared.
        accelerator: that will wrap it.
    """
    routed = routed_parents(model)
    if not routed:
        return
    if plan.config.distributed.option == "ddp":
        accelerator.ddp_handler.find_unused_parameters = True
    elif plan.config.distributed.option in ("fsdp", *STAGES):
        for parent in routed:
            depend_on_all(parent, late=plan.config.distributed.option == "zero3")
    if plan.config.distributed.option == "zero3":  # gathers such a module as a whole
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, list({type(parent) for parent in routed}))


BUILDERS: dict[str, Callable[[], list[Any]]] = {
    "none": _alone,
    "ddp": _ddp,
    "fsdp": _alone,
    "dp": _alone,
    **dict.fromkeys(
        STAGES, _alone
    ),  # DeepSpeed's engine is built elsewhere (training/distributed/deepspeed.py)
}
"""Option of the group `distributed` -> its handlers."""
