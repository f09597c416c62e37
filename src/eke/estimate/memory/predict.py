"""The forecast of a plan: phases, components, what the device adds, and whether there is room."""

from collections.abc import Iterable
from dataclasses import replace

from eke.common.units import GIB, MIB
from eke.estimate.memory.merge_trace import narrowed
from eke.estimate.memory.notes import ROWS_DIFFER, notes_of
from eke.estimate.memory.phases import COMPONENTS, Moment, Parts, moments, moments_of
from eke.estimate.memory.ranges import spread
from eke.estimate.memory.shape import WORKSPACE_BYTES
from eke.estimate.memory.values import PHASES, Forecast, Method, Range, Traced, Verdict
from eke.models.sizes import shared_state_bytes
from eke.plan.planner import Micro, Plan

CONTEXT = Range(0, 500 * MIB, 1400 * MIB)
"""The driver's own share of a GPU, kernels included. 1343 MB were seen on a V100 of 2022 (the
guides, huggingface.co/docs/transformers/perf_train_gpu_one), 300 to 500 MB are typical since
kernels are loaded when first used; no lower bound is known."""

RESERVE_SHARE = (0.03, 0.25)
"""Of allocated memory that the caching allocator holds beside it: 1 to 2 % were simulated for BERT,
24 % for a 1-billion-parameter Llama with checkpointing."""

SEGMENT_BYTES = 20 * MIB
"""Smallest piece the allocator asks for beyond 1 MiB: torch's c10/cuda/CUDACachingAllocator."""

PYTHON_BYTES = GIB // 2
"""Of a CPU's memory, for each process, before its first tensor: Python, torch and its kernels took
0.4 GB (memory by stage, README.md), and more of them are loaded while a model is built."""

TRAINED = ("forward", "backward", "optimizer")
"""Phases of a step, which a record's measured peak is of on a CPU."""

HOPPER = (9, 0)


def forecast(plan: Plan, traced: Traced | None = None) -> Forecast:
    """Memory of one plan on its device: in closed form, narrowed by a trace where there is one.

    Args:
        plan: of the run; for several processes the first one's device is looked at.
        traced: what a trace of the same plan found.
    """
    found = moments(plan)
    method, notes = Method.closed_form, notes_of(plan)
    # ZeRO-3's linear layers keep other tensors than those that are traced (see moments.kept), and
    # on two ranks formulas were right to 5 % where the trace was to 16 % (docs/lab.md).
    if traced is not None and plan.config.distributed.option != "zero3":
        found = narrowed(plan, found, traced)
        method, notes = traced.method, (*traced.notes, *_unanswered(notes))
    on_cpu = plan.device.kind == "cpu"
    measured = [m for m in found if m.phase in TRAINED or not on_cpu]
    allocated = highest(moment.tensors for moment in measured)
    whole = found if on_cpu else [_on_gpu(plan, moment) for moment in found]
    peak = highest(moment.total for moment in whole)
    top = max(whole, key=lambda moment: moment.total.expected)
    capacity = room(plan)
    return Forecast(
        method=method,
        basis=_basis(plan),
        peak=peak,
        allocated=allocated,
        phases={phase: _phase(found, phase) for phase in PHASES},
        components=_components(top.parts),
        capacity=capacity,
        verdict=verdict(peak, capacity),
        notes=notes,
    )


def allocated_of(plan: Plan, micro: Micro) -> int:
    """Highest sum of tensors in a step of such micro-batches, in closed form."""
    found = moments_of(plan, micro)
    return max(each.tensors.expected for each in found if each.phase in TRAINED)


def highest(moments: Iterable[Range]) -> Range:
    """The most of any moment: of the low ends, of the expected values and of the high ends."""
    ranges = list(moments)
    return Range(
        max(each.low for each in ranges),
        max(each.expected for each in ranges),
        max(each.high for each in ranges),
    )


def verdict(peak: Range, capacity: int | None) -> Verdict:
    """Whether a peak has room in so many bytes."""
    if capacity is None:
        return Verdict.unknown
    if peak.expected > capacity:
        return Verdict.does_not_fit
    return Verdict.fits if peak.high <= capacity else Verdict.tight


def room(plan: Plan) -> int | None:
    """Bytes of the device that are forecast for one process; None where nobody knows.

    A CPU's memory is shared by all processes, with their Python and with what others hold of it.
    """
    memory, left = plan.device.memory_bytes, plan.device.available_bytes
    if memory is None:
        return None
    free = memory if left is None else min(memory, left)
    if plan.device.kind != "cpu":
        return free
    return max(0, free // max(1, plan.processes_per_node) - PYTHON_BYTES)


def least_bytes(plan: Plan, found: Forecast) -> int:
    """Bytes that a run takes of its device's memory by the lowest forecast, all its processes."""
    if plan.device.kind != "cpu":
        return found.peak.low
    return (found.peak.low + PYTHON_BYTES) * max(1, plan.processes_per_node)


def least_host_bytes(plan: Plan, found: Forecast) -> int:
    """Bytes that a run takes at least of its machine's own memory, wherever it trains."""
    if plan.device.kind == "cpu":
        return least_bytes(plan, found)
    there, all_of_it = (shared_state_bytes(plan.config, plan.size, host) for host in (False, True))
    offloaded = max(0, all_of_it.total - there.total)
    return (PYTHON_BYTES + offloaded) * max(1, plan.processes_per_node)


def with_room(plan: Plan, size: int) -> Plan:
    """The same on a device of which each process has so many bytes for what is forecast."""
    memory = size
    if plan.device.kind == "cpu":
        memory = (size + PYTHON_BYTES) * max(1, plan.processes_per_node)
    return replace(plan, device=replace(plan.device, memory_bytes=memory, available_bytes=None))


def highest_phase(found: Forecast) -> str:
    """The phase of the expected peak."""
    return max(found.phases, key=lambda phase: found.phases[phase])


def _on_gpu(plan: Plan, moment: Moment) -> Moment:
    """With cuBLAS' workspace, the allocator's reserve and the driver's context."""
    hopper = (plan.device.capability or (0, 0)) >= HOPPER
    space = WORKSPACE_BYTES["hopper" if hopper else "other"]
    if moment.phase == "load":
        space = 0
    allocated = moment.total
    reserve = spread(
        0,
        int(allocated.expected * RESERVE_SHARE[0]) + SEGMENT_BYTES,
        int(allocated.high * RESERVE_SHARE[1]) + 4 * SEGMENT_BYTES,
    )
    parts = {"workspace": spread(0, space, 3 * space), "reserve": reserve, "context": CONTEXT}
    # What a trace's replay has found as segments has its reserve already.
    more = {name: moment.parts.get(name, part) for name, part in parts.items()}
    return replace(moment, parts=moment.parts | more)


def _phase(found: Iterable[Moment], phase: str) -> int:
    return max((m.tensors.expected for m in found if m.phase == phase), default=0)


def _components(parts: Parts) -> dict[str, int]:
    """Those that there are, in their order."""
    order = {name: number for number, name in enumerate(COMPONENTS)}
    names = sorted(parts, key=lambda name: order.get(name, len(order)))
    return {name: parts[name].expected for name in names if parts[name].expected}


def _unanswered(notes: tuple[str, ...]) -> tuple[str, ...]:
    """Of the closed form's notes, those that a trace does not answer."""
    return tuple(n for n in notes if "shared" in n or "context" in n or n is ROWS_DIFFER)


def _basis(plan: Plan) -> str:
    if plan.device.kind == "cpu":
        many = plan.processes_per_node
        each = f", of each of {many} processes" if many > 1 else ""
        return f"tensors in host memory{each}, without Python and libraries"
    return "reserved by PyTorch on the GPU, and the driver's context"
