"""What an optimizer needs while it steps, beside its state, by the formulas of its description."""

from dataclasses import replace
from math import prod

from eke.config.schema import Config
from eke.estimate.memory.ranges import NOTHING, spread
from eke.estimate.memory.values import Range
from eke.models.sizes import (
    FLOAT32_BYTES,
    STAGE,
    Role,
    Weight,
    algorithm,
    describe,
    flat_pieces,
    has_master,
    is_quantised,
    projection_rank,
    weight_bytes,
)
from eke.models.sizes.optimizer_descriptions import LOOPS, Step
from eke.plan.planner import Plan


def optimizer_temporaries(plan: Plan, parts: tuple[Weight, ...]) -> Range:
    """Bytes beside weights, gradients and states while the optimizer steps.

    Args:
        plan: of the run.
        parts: `eke.models.sizes.training_structure` of the plan's configuration.
    """
    config = plan.config
    trained = [w for w in parts if w.trained]
    if not trained:
        return NOTHING
    number = FLOAT32_BYTES if has_master(config) else weight_bytes(config)
    if config.distributed.option in STAGE:  # flat pieces, one after the other
        trained, number = flat_pieces(config), FLOAT32_BYTES
    largest = number * max(prod(w.shape) for w in trained)
    in_8_bits = number * max(
        (prod(w.shape) for w in trained if is_quantised(config.optimizer, w)), default=0
    )
    step = Step(
        config.optimizer,
        largest,
        *_groups(trained, number),
        hidden=_hidden(trained, number),
        in_8_bits=in_8_bits,
        number_bytes=number,
        on_cpu=plan.device.kind == "cpu",
    )
    in_backward = config.memory.optimizer_in_backward
    if in_backward:  # one weight at a time
        step = replace(step, group=largest, total=largest)
    loop = plan.compute.optimizer_implementation
    formula = LOOPS[loop] if loop else describe(config.optimizer).temporaries
    found = spread(0, *formula(step))
    if has_master(config) and not in_backward and config.distributed.option not in STAGE:
        # The gradients once more, in float32, while the optimizer steps on the copies.
        more = 0 if step.on_cpu else step.total // 4
        found = spread(found.low, found.expected + step.total // 2, found.high + step.total + more)
    return found


def singular_vectors(config: Config, parts: tuple[Weight, ...]) -> int:
    """Bytes that GaLore holds beside its projections: they are slices of all singular vectors.

    Source: galore-torch 1.0, galore_projector.py, get_orthogonal_matrix; a slice keeps the whole.
    """
    if not algorithm(config.optimizer).keeps_singular_vectors:
        return 0
    rank, number = projection_rank(config), weight_bytes(config)
    short = [min(w.shape) for w in parts if w.trained and w.role is Role.hidden]
    return number * sum(side * max(0, side - rank) for side in short)


def _groups(trained: list[Weight], number: int) -> tuple[int, int]:
    by_role = [sum(prod(w.shape) for w in trained if w.role is role) for role in Role]
    return number * max(by_role), number * sum(by_role)


def _hidden(trained: list[Weight], number: int) -> int:
    return number * max((prod(w.shape) for w in trained if w.role is Role.hidden), default=0)
