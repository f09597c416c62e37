"""How the processes of one run share its model, in Accelerate's terms."""

from collections.abc import Callable
from typing import Any

from eke.plan import Plan
from eke.plan.deepspeed import STAGES


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


BUILDERS: dict[str, Callable[[], list[Any]]] = {
    "none": _alone,
    "ddp": _ddp,
    "fsdp": _alone,
    "dp": _alone,
    **dict.fromkeys(STAGES, _alone),  # DeepSpeed's engine is built elsewhere (build/deepspeed.py)
}
"""Option of the group `distributed` -> its handlers."""
