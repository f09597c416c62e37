"""Tokens of a row as it is computed: with its padding, on average over a training."""

from eke.estimate.memory.shape import Shape, shape_of
from eke.plan.planner import Plan, drawn

ROWS_DIFFER = "samples differ in length: their mean over a training is counted"


def mean_shape(plan: Plan) -> tuple[Shape, str]:
    """The shape of a training's mean micro-batch, and a note where they differ."""
    made = drawn(plan)
    return shape_of(plan, made.mean), ROWS_DIFFER if made.differ else ""
