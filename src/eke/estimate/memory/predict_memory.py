"""Memory forecast of a plan: phases, components, device overhead, and fit.

By formulas, and by a cached or new trace where that is more accurate.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from eke.common.text import GIB, MIB
from eke.estimate.memory import trace_client
from eke.estimate.memory.components import (
    NOTHING,
    PHASES,
    UNTRACED,
    Forecast,
    Method,
    Range,
    Traced,
    Verdict,
    doubts_of,
    exact,
    is_fsdp,
    range_around,
)
from eke.estimate.memory.phases import COMPONENTS, Moment, moments, moments_of
from eke.estimate.memory.sharding import saved_bytes
from eke.models.sizes import STAGE, shared_state_bytes
from eke.plan.planner import Micro, Plan, drawn
from eke.plan.planner.planner import workspace_bytes

ERROR = {"cpu": 0.02, "cuda": 0.06}
"""How far a trace may be from the truth, as a share of the peak. Chosen, not measured: on a CPU
0.085 % was the most (results/memory_truth_cpu.json), with as many threads as the run; on GPUs it is
the goal that is still to be measured (docs/how-to/forecast.md)."""

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


def narrowed(plan: Plan, found: list[Moment], traced: Traced) -> list[Moment]:
    """The moments of the closed form with a trace's numbers.

    Where processes share, states, gradients and buffers stay those of the closed form, and only the
    rest is the trace's, at moments when all of it is alive.
    """
    option = plan.config.distributed.option
    copies = option == "ddp" and plan.batch.world_size > 1
    if copies or is_fsdp(plan.config) or option in STAGE:
        return [_with_traced_activations(moment, traced) for moment in found]
    # Of each phase the highest moment, the first of several.
    closed = {m.phase: m for m in sorted(reversed(found), key=lambda m: m.total.expected)}
    traces = [_traced(closed[phase], traced, plan) for phase in traced.allocated if phase in closed]
    return traces or found


def _traced(closed: Moment, traced: Traced, plan: Plan) -> Moment:
    """One phase as traced: what is alive and, at the highest, the allocator's reserve.

    If a trace is of something else (another kernel), the ends of the closed form hold; where
    micro-batches differ in length, its low end, and its high end if there are longer ones.
    """
    allocated, config = traced.allocated[closed.phase], plan.config
    # A compiled model or liger's kernels change every pass, a compiled optimizer its step alone.
    changed = config.compile.option != "none" or config.kernels.option == "liger"
    is_bound = traced.method is Method.upper_bound and (changed or closed.phase == "optimizer")
    if is_bound and allocated > closed.total.expected:  # its formula expects better
        more = max(0, allocated - closed.total.high)
        return replace(closed, parts=closed.parts | {"others": range_around(0, 0, more)})
    is_top = allocated == max(traced.allocated.values())
    known = traced.components if is_top and sum(traced.components.values()) <= allocated else {}
    sizes: Counter[str] = Counter()
    for name, size in known.items():
        sizes[NAMES.get(name, name)] += size
    parts = {name: exact(size) for name, size in sizes.items()}
    others = allocated - sum(known.values())
    doubt = int(ERROR[plan.device.kind] * allocated) + MIB // 16
    parts["others"] = range_around(0, others, others + doubt)
    if "buffers" in closed.parts:  # of DataParallel: a trace has one process
        parts["buffers"] = closed.parts["buffers"]
    is_exact = traced.method is Method.trace and traced.is_exact
    made = drawn(plan)
    if not is_exact or made.expected != made.longest:
        missing = closed.total.high - sum(part.high for part in parts.values())
        parts["others"] = range_around(0, others, others + doubt + max(0, missing))
    is_sure = is_exact and not made.differ
    low = max(0, allocated - doubt) if is_sure else closed.total.low
    for name, part in parts.items():  # low ends add up to it, taken from the components in order
        parts[name] = range_around(min(low, part.expected), part.expected, part.high)
        low -= parts[name].low
    if plan.device.kind != "cpu":
        reserve = max(traced.reserved.values()) - allocated if is_top else 0
        parts["reserve"] = range_around(0, reserve, reserve * 3 // 2)
    return replace(closed, parts=parts)


def _with_traced_activations(moment: Moment, traced: Traced) -> Moment:
    """States and buffers of the closed form; what else is alive is the trace's."""
    beside = traced.beside.get(moment.phase)
    if beside is None or moment.name not in (*WHOLE, *PARTLY):
        return moment
    kept = {k: v for k, v in moment.parts.items() if k in (*STATES, "buffers")}
    closed = sum(part.expected for name, part in moment.parts.items() if name not in kept)
    if moment.name in PARTLY and closed <= beside:
        return moment
    high = beside * (100 + DOUBT_PERCENT) // 100 + MIB // 16
    parts = kept | {"activations": range_around(beside // 2, beside, high)}
    return replace(moment, parts=parts)


CONTEXT = Range(0, 500 * MIB, 1400 * MIB)
"""The driver's own share of a GPU, kernels included. 1343 MB were seen on a V100 of 2022 (the
guides, huggingface.co/docs/transformers/perf_train_gpu_one), 300 to 500 MB are typical since
kernels are loaded when first used; no lower bound is known."""

RESERVE_SHARE = (0.03, 0.25)
"""The caching allocator's reserve as a share of allocated memory: 1 to 2 % simulated for BERT, 24 %
for a 1-billion-parameter Llama with checkpointing."""

SEGMENT_BYTES = 20 * MIB
"""Smallest piece the allocator asks for beyond 1 MiB: torch's c10/cuda/CUDACachingAllocator."""

PYTHON_BYTES = GIB // 2
"""Of a CPU's memory, for each process, before its first tensor: Python, torch and its kernels took
0.4 GB (memory by stage, README.md), and more of them are loaded while a model is built."""

TRAINED = ("forward", "backward", "optimizer")
"""Phases of a step, which a record's measured peak is of on a CPU."""


def forecast(plan: Plan, traced: Traced | None = None) -> Forecast:
    """Memory of a plan on its (first) device: in closed form, narrowed by its trace if given."""
    found = moments(plan)
    method, doubts = Method.closed_form, doubts_of(plan)
    substitutions: tuple[str, ...] = ()
    # ZeRO-3's linear layers keep other tensors than those that are traced (see moments.kept), and
    # on two ranks formulas were right to 5 % where the trace was to 16 % (docs/lab/memory.md).
    if traced is not None and plan.config.distributed.option != "zero3":
        found = narrowed(plan, found, traced)
        method, substitutions = traced.method, traced.notes
        doubts = tuple(doubt for doubt in doubts if doubt in UNTRACED)
    on_cpu = plan.device.kind == "cpu"
    measured = [m for m in found if m.phase in TRAINED or not on_cpu]
    allocated = highest_range(moment.tensors for moment in measured)
    whole = found if on_cpu else [_on_gpu(plan, moment, found) for moment in found]
    peak = highest_range(moment.total for moment in whole)
    top = max(whole, key=lambda moment: moment.total.expected)
    capacity = room(plan)
    basis = "reserved by PyTorch on the GPU, and the driver's context"
    if on_cpu:
        many = plan.processes_per_node
        each = f", of each of {many} processes" if many > 1 else ""
        basis = f"tensors in host memory{each}, without Python and libraries"
    return Forecast(
        method=method,
        basis=basis,
        peak=peak,
        allocated=allocated,
        phases={
            phase: max((m.tensors.expected for m in found if m.phase == phase), default=0)
            for phase in PHASES
        },
        components={
            name: top.parts[name].expected
            for name in sorted(top.parts, key=lambda name: (*COMPONENTS, name).index(name))
            if top.parts[name].expected
        },
        capacity=capacity,
        verdict=verdict(peak, capacity),
        doubts=doubts,
        substitutions=substitutions,
    )


def allocated_of(plan: Plan, micro: Micro) -> int:
    """Highest sum of tensors in a step of such micro-batches, in closed form."""
    found = moments_of(plan, micro)
    return max(each.tensors.expected for each in found if each.phase in TRAINED)


def highest_range(moments: Iterable[Range]) -> Range:
    """The most of any moment: of the low ends, of the expected values and of the high ends."""
    ranges = list(moments)
    return Range(
        max(each.low for each in ranges),
        max(each.expected for each in ranges),
        max(each.high for each in ranges),
    )


def verdict(peak: Range, capacity: int | None) -> Verdict:
    """Whether a peak fits into a number of bytes."""
    if capacity is None:
        return Verdict.unknown
    if peak.expected > capacity:
        return Verdict.does_not_fit
    return Verdict.fits if peak.high <= capacity else Verdict.tight


def room(plan: Plan) -> int | None:
    """Bytes of the device that are forecast for one process; None if unknown.

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


def least_host_bytes(plan: Plan, found: Forecast, copies: bool = True) -> int:
    """Bytes that a run takes at least of its machine's own memory; with `copies` while it saves."""
    if plan.device.kind == "cpu":
        return least_bytes(plan, found)
    there, all_of_it = (
        shared_state_bytes(plan.config, plan.size, host, plan.compute.formats)
        for host in (False, True)
    )
    offloaded = max(0, all_of_it.total - there.total)
    behind = copies and plan.config.train.checkpoint_async is not False
    copied = saved_bytes(plan) if behind else 0
    return (PYTHON_BYTES + offloaded + copied) * max(1, plan.processes_per_node)


def with_room(plan: Plan, size: int) -> Plan:
    """The same on a device of which each process has so many bytes for what is forecast."""
    memory = size
    if plan.device.kind == "cpu":
        memory = (size + PYTHON_BYTES) * max(1, plan.processes_per_node)
    return replace(plan, device=replace(plan.device, memory_bytes=memory, available_bytes=None))


def highest_phase(found: Forecast) -> str:
    """The phase of the expected peak."""
    return max(found.phases, key=lambda phase: found.phases[phase])


def _on_gpu(plan: Plan, moment: Moment, every: Sequence[Moment]) -> Moment:
    """With cuBLAS' workspace, the allocator's reserve and the driver's context."""
    space = 0 if moment.phase == "load" else workspace_bytes(plan.device.capability)
    allocated, held = moment.total, 0
    if is_fsdp(plan.config):  # makes them on a stream of its own, whose memory no other one has
        gradients = [m.parts.get("gradients", NOTHING).expected for m in (moment, *every)]
        held = max(gradients) - gradients[0]
    reserve = range_around(
        0,
        int(allocated.expected * RESERVE_SHARE[0]) + SEGMENT_BYTES + held,
        int(allocated.high * RESERVE_SHARE[1]) + 4 * SEGMENT_BYTES + held,
    )
    parts = {"workspace": range_around(0, space, 3 * space), "reserve": reserve, "context": CONTEXT}
    # What a trace's replay has found as segments has its reserve already.
    more = {name: moment.parts.get(name, part) for name, part in parts.items()}
    return replace(moment, parts=moment.parts | more)


def known_forecast(plan: Plan) -> Forecast:
    """By a trace that is kept, else by formulas; nothing is started."""
    return forecast(plan, trace_client.find_trace(trace_client.trace_key(plan)))


def traced_forecast(plan: Plan) -> Forecast:
    """By a trace, made now unless it is kept; by formulas, with the reason, where there is none."""
    return _with(plan, trace_client.traced(plan))


def traced_forecasts(
    plans: Sequence[Plan], progress: Callable[[int, int], Any], processes: int
) -> list[Forecast]:
    """The same for many plans at once, each trace made once; arguments as of `trace_all`."""
    answers = trace_client.trace_all(plans, progress, processes)
    return [_with(plan, answer) for plan, answer in zip(plans, answers, strict=True)]


def is_open(found: Forecast) -> bool:
    """Whether formulas cannot decide the fit, so that a trace is worthwhile."""
    if found.method is not Method.closed_form or found.capacity is None:
        return False
    # Of an encoder and decoder without formulas not even the layers are known.
    return "architecture" in found.doubts or found.peak.low <= found.capacity < found.peak.high


def _with(plan: Plan, answer: trace_client.Answer) -> Forecast:
    found = forecast(plan, answer.traced)
    return found if answer.traced is not None else replace(found, not_traced=answer.reason)
