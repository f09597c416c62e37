"""What a trace knows better than formulas, put in their place."""

from collections import Counter
from dataclasses import replace

from eke.common.units import MIB
from eke.estimate.memory.phases import Moment
from eke.estimate.memory.ranges import exact, spread, total
from eke.estimate.memory.shape import is_fsdp
from eke.estimate.memory.values import Method, Range, Traced
from eke.models.sizes import STAGE
from eke.plan.planner import Plan, drawn

ERROR = {"cpu": 0.02, "cuda": 0.06}
"""How far a trace may be from the truth, as a share of the peak. Chosen, not measured: on a CPU
0.085 % was the most (results/memory_truth_cpu.json), with as many threads as the run; on GPUs it is
the goal that is still to be measured (docs/forecast.md)."""

NAMES = {"logits_and_loss": "logits", "autocast_cache": "autocast", "workspaces": "temporaries"}
"""A trace's components that the closed form calls otherwise."""

WHOLE = ("forward", "loss", "evaluation")
"""Moments at which all that a phase keeps at once is alive."""

PARTLY = ("last_layer", "middle")
"""Those at which no more of it is."""

DOUBT_PERCENT = 10
"""How much more of it there may be under sharing than a process without others has. Chosen, not
measured: hooks of sharing keep inputs of layers alive, or copies of what they gather."""

STATES = ("weights", "gradients", "optimizer", "master")


def is_shared(plan: Plan) -> bool:
    """Whether processes hold gradients otherwise than a trace of one that has all of them."""
    option = plan.config.distributed.option
    copies = option == "ddp" and plan.batch.world_size > 1
    return copies or is_fsdp(plan.config) or option in STAGE


def narrowed(plan: Plan, found: list[Moment], traced: Traced) -> list[Moment]:
    """The moments of the closed form with a trace's numbers.

    Where processes share, states, gradients and buffers stay those of the closed form, and only
    what lies beside them is the trace's, at moments when all of it is alive.
    """
    if is_shared(plan):
        return [_with_traced_activations(moment, traced) for moment in found]
    closed = _one_of_each(found)
    traces = [_traced(closed[phase], traced, plan) for phase in traced.allocated if phase in closed]
    return traces or found


def _one_of_each(found: list[Moment]) -> dict[str, Moment]:
    """Of each phase the highest moment."""
    best: dict[str, Moment] = {}
    for moment in found:
        known = best.get(moment.phase)
        if known is None or moment.total.expected > known.total.expected:
            best[moment.phase] = moment
    return best


def _traced(closed: Moment, traced: Traced, plan: Plan) -> Moment:
    """One phase as traced: what is alive and, at the highest, what the allocator holds beside.

    Where a trace says that it is of something else (another kernel), the ends of the closed form
    hold; where micro-batches differ in length, its low end, and its high end if there are longer
    ones than the one that was traced.
    """
    allocated = traced.allocated[closed.phase]
    if _is_bound(plan, traced, closed.phase) and allocated > closed.total.expected:
        more = max(0, allocated - closed.total.high)
        return replace(closed, parts=closed.parts | {"others": spread(0, 0, more)})
    is_top = allocated == max(traced.allocated.values())
    known = traced.components if is_top and sum(traced.components.values()) <= allocated else {}
    sizes: Counter[str] = Counter()
    for name, size in known.items():
        sizes[NAMES.get(name, name)] += size
    parts = {name: exact(size) for name, size in sizes.items()}
    others = allocated - sum(known.values())
    doubt = int(ERROR[plan.device.kind] * allocated) + MIB // 16
    parts["others"] = spread(0, others, others + doubt)
    if "buffers" in closed.parts:  # of DataParallel: a trace has one process
        parts["buffers"] = closed.parts["buffers"]
    is_exact = traced.method is Method.trace and not traced.notes
    made = drawn(plan)
    if not is_exact or made.expected != made.longest:
        missing = closed.total.high - total(parts.values()).high
        parts["others"] = spread(0, others, others + doubt + max(0, missing))
    is_sure = is_exact and not made.differ
    parts = _lowered(parts, max(0, allocated - doubt) if is_sure else closed.total.low)
    if plan.device.kind != "cpu":
        reserve = max(traced.reserved.values()) - allocated if is_top else 0
        parts["reserve"] = spread(0, reserve, reserve * 3 // 2)
    return replace(closed, parts=parts)


def _is_bound(plan: Plan, traced: Traced, phase: str) -> bool:
    """Whether a phase was traced as something that needs more: its formula expects better.

    A compiled model or liger's kernels change every pass, a compiled optimizer its step alone.
    """
    if traced.method is not Method.upper_bound:
        return False
    config = plan.config
    passes = config.compile.option != "none" or config.kernels.option == "liger"
    return passes or phase == "optimizer"


def _lowered(parts: dict[str, Range], low: int) -> dict[str, Range]:
    """The same with low ends that add up to `low`, taken from the components in order."""
    lowered = {}
    for name, part in parts.items():
        share = min(low, part.expected)
        lowered[name] = spread(share, part.expected, part.high)
        low -= share
    return lowered


def _with_traced_activations(moment: Moment, traced: Traced) -> Moment:
    """States and buffers of the closed form; what else is alive is the trace's."""
    beside = traced.beside.get(moment.phase)
    if beside is None or moment.name not in (*WHOLE, *PARTLY):
        return moment
    kept = {k: v for k, v in moment.parts.items() if k in (*STATES, "buffers")}
    closed = total(part for name, part in moment.parts.items() if name not in kept)
    if moment.name in PARTLY and closed.expected <= beside:
        return moment
    high = beside * (100 + DOUBT_PERCENT) // 100 + MIB // 16
    parts = kept | {"activations": spread(beside // 2, beside, high)}
    return replace(moment, parts=parts)
