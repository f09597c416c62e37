"""Learning-rate schedules: a multiplier of the peak for each step, with no state to restore."""

import math
from collections.abc import Callable

from eke.config.schema import DecayingSchedule, WSDSchedule
from eke.plan.planner import Plan

Multiplier = Callable[[int], float]
"""Step number from 0 -> share of the peak learning rate."""


def build_schedule(plan: Plan) -> Multiplier:
    """Warm-up from peak / warm-up steps, then the option's shape over the remaining steps."""
    warmup, total = plan.steps.warmup, plan.steps.total
    shape = SHAPES[plan.config.schedule.option](plan)

    def multiplier(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return shape((step - warmup) / max(1, total - warmup))

    return multiplier


def _constant(plan: Plan) -> Callable[[float], float]:
    return lambda progress: 1.0


def _final(plan: Plan) -> float:
    assert isinstance(plan.config.schedule, DecayingSchedule)
    return plan.config.schedule.final_frac


def _linear(plan: Plan) -> Callable[[float], float]:
    final = _final(plan)
    return lambda progress: 1.0 + (final - 1.0) * progress


def _cosine(plan: Plan) -> Callable[[float], float]:
    final = _final(plan)
    return lambda progress: final + (1.0 - final) * (1.0 + math.cos(math.pi * progress)) / 2


def _wsd(plan: Plan) -> Callable[[float], float]:
    schedule, final = plan.config.schedule, _final(plan)
    assert isinstance(schedule, WSDSchedule)
    total, warmup = plan.steps.total, plan.steps.warmup
    # A decay longer than what is left after warm-up starts right there, at the peak.
    decay = min(1.0, max(1e-9, schedule.decay_frac * total / max(1, total - warmup)))
    return lambda progress: 1.0 + (final - 1.0) * max(0.0, (progress - 1.0 + decay) / decay)


SHAPES: dict[str, Callable[[Plan], Callable[[float], float]]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
}
"""Option of the group `schedule` -> multiplier over the share of the run after warm-up."""
