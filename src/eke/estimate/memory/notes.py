"""Why a closed form's range is as wide as it is."""

from collections.abc import Callable

from eke.estimate.memory.shape import Shape, is_fsdp, shape_of, trains_adapters
from eke.models.sizes import STAGE
from eke.plan.planner import Plan, drawn

Condition = Callable[[Plan, Shape], object]

ROWS_DIFFER = "samples differ in length: the longest micro-batch that a training meets is counted"

NOTES: tuple[tuple[Condition, str], ...] = (
    (
        lambda plan, shape: shape.family == "other",
        "no formulas for this architecture: a Llama of its sizes stands in",
    ),
    (
        lambda plan, shape: plan.config.compile.option not in ("none", "eager"),
        "torch.compile decides itself what it keeps for the backward pass",
    ),
    (
        lambda plan, shape: plan.config.kernels.option == "liger",
        "fused kernels keep less than the model's own operations",
    ),
    (
        lambda plan, shape: drawn(plan).differ,
        ROWS_DIFFER,
    ),
    (
        lambda plan, shape: trains_adapters(plan.config),
        "adapters change what each layer keeps",
    ),
    (
        lambda plan, shape: shape.experts,
        "experts see as many tokens as the router sends them",
    ),
    (
        lambda plan, shape: plan.config.peft.option == "qlora",
        "4-bit weights are unpacked layer by layer",
    ),
    (
        lambda plan, shape: plan.config.distributed.deepspeed_config,
        "a ds_config.json of one's own may move or share anything",
    ),
    (
        lambda plan, shape: is_fsdp(plan.config) or plan.config.distributed.option in STAGE,
        "when shared weights are gathered, and how many at once, is the library's",
    ),
    (
        lambda plan, shape: plan.config.distributed.option == "dp",
        "the first device gathers what the others computed",
    ),
    (
        lambda plan, shape: plan.compute.float8 != "off",
        "float8 operands are kept beside 16-bit ones",
    ),
    (
        lambda plan, shape: plan.config.model.dropout is None and shape.dropout,
        "the checkpoint's own dropout is not known here: 0.1 is counted",
    ),
    (
        lambda plan, shape: not shape.on_cpu,
        "the driver's context and the allocator's reserve are known as ranges",
    ),
)
"""When it holds, and what it says, in one clause."""


def notes_of(plan: Plan) -> tuple[str, ...]:
    """Each reason that holds; none where the formulas know the techniques well."""
    shape = shape_of(plan)
    return tuple(text for holds, text in NOTES if holds(plan, shape))
