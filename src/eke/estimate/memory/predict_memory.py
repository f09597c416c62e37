"""Memory forecast of a plan: phases, components, overhead and fit, by formulas and traces."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, replace
from typing import Any

from eke.common.text import GIB, MIB
from eke.estimate.memory import components, trace_client
from eke.estimate.memory.components import ZERO_RANGE, Forecast, Method, Range, range_around
from eke.estimate.memory.peak_by_phase import COMPONENTS, MemoryPoint, memory_points, moments
from eke.estimate.memory.sharding import saved_bytes
from eke.models.sizes import shared_state_bytes
from eke.plan.planner import MicroBatchShape, Plan, simulated_micro_batches
from eke.plan.planner.planner import workspace_bytes

_ERROR = {"cpu": 0.02, "cuda": 0.06}
"""Largest error of a trace relative to the peak: a choice. On a CPU, 0.085 % was the most
(results/memory_truth_cpu.json). On GPUs it is not yet measured (docs/how-to/forecast.md)."""

_NAMES = {"logits_and_loss": "logits", "autocast_cache": "autocast", "workspaces": "temporaries"}
"""Names in the closed form of a trace's components."""

_FULLY_SHARED = ("forward", "loss", "evaluation")
"""Moments at which all memory kept by a phase is alive."""

_PARTLY = ("last_layer", "middle")
"""Moments at which at most a part of it is alive."""

_DOUBT_PERCENT = 10
"""Percent that sharding may add to a process's other memory, such as kept inputs: a choice."""

_STATES = ("weights", "gradients", "optimizer", "master")


def _refine_with_trace(
    plan: Plan, found: list[MemoryPoint], traced: components.Traced
) -> list[MemoryPoint]:
    """Return the closed form's moments with a trace's numbers.

    A trace is of one process. With several, states and buffers remain those of the closed form.
    """
    if plan.ranks.shards_states or (plan.ranks.is_ddp and plan.batch.world_size > 1):
        return [_with_traced_activations(moment, traced) for moment in found]
    # The highest moment of each phase, the first one of equals.
    closed = {m.phase: m for m in sorted(reversed(found), key=lambda m: m.total.expected)}
    traces = [_traced(closed[phase], traced, plan) for phase in traced.allocated if phase in closed]
    return traces or found


def _traced(closed: MemoryPoint, traced: components.Traced, plan: Plan) -> MemoryPoint:
    """Return one phase as traced: live components and, at the peak, the allocator's reserve.

    Ends of the closed form apply if the trace is not exact or micro-batches differ in length.
    """
    allocated, config = traced.allocated[closed.phase], plan.config
    # A compiled model or liger's kernels change every pass, a compiled optimizer only its step.
    changed = config.compile.is_on or config.kernels.is_liger
    is_bound = traced.method is Method.upper_bound and (changed or closed.phase == "optimizer")
    if is_bound and allocated > closed.total.expected:  # the formula is closer
        more = max(0, allocated - closed.total.high)
        return replace(closed, parts=closed.parts | {"others": range_around(0, 0, more)})
    is_top = allocated == max(traced.allocated.values())
    known = traced.components if is_top and sum(traced.components.values()) <= allocated else {}
    sizes: Counter[str] = Counter()
    for name, size in known.items():
        sizes[_NAMES.get(name, name)] += size
    parts = {name: components.exact_range(size) for name, size in sizes.items()}
    others = allocated - sum(known.values())
    doubt = int(_ERROR[plan.device.kind] * allocated) + MIB // 16
    parts["others"] = range_around(0, others, others + doubt)
    if "buffers" in closed.parts:  # of DataParallel, while a trace has one process
        parts["buffers"] = closed.parts["buffers"]
    is_exact = traced.method is Method.trace and traced.is_exact
    made = simulated_micro_batches(plan)
    if not is_exact or made.expected != made.longest:
        missing = closed.total.high - sum(part.high for part in parts.values())
        parts["others"] = range_around(0, others, others + doubt + max(0, missing))
    is_sure = is_exact and not made.differ
    low = max(0, allocated - doubt) if is_sure else closed.total.low
    for name, part in parts.items():  # distribute the low end over the components in order
        parts[name] = range_around(min(low, part.expected), part.expected, part.high)
        low -= parts[name].low
    if plan.device.kind != "cpu":
        reserve = max(traced.reserved.values()) - allocated if is_top else 0
        parts["reserve"] = range_around(0, reserve, reserve * 3 // 2)
    return replace(closed, parts=parts)


def _with_traced_activations(moment: MemoryPoint, traced: components.Traced) -> MemoryPoint:
    """Return states and buffers of the closed form with the rest of the trace."""
    beside = traced.beside.get(moment.phase)
    if beside is None or moment.name not in (*_FULLY_SHARED, *_PARTLY):
        return moment
    kept = {k: v for k, v in moment.parts.items() if k in (*_STATES, "buffers")}
    closed = sum(part.expected for name, part in moment.parts.items() if name not in kept)
    if moment.name in _PARTLY and closed <= beside:
        return moment
    high = beside * (100 + _DOUBT_PERCENT) // 100 + MIB // 16
    parts = kept | {"activations": range_around(beside // 2, beside, high)}
    return replace(moment, parts=parts)


_CONTEXT = Range(0, 500 * MIB, 1400 * MIB)
"""The driver's share of a GPU, including kernels. 1343 MB on a V100 in 2022 (the guides,
huggingface.co/docs/transformers/perf_train_gpu_one), typically 300 to 500 MB since kernels are
loaded at first use. No lower bound is known."""

_RESERVE_SHARE = (0.03, 0.25)
"""The caching allocator's reserve as a share of allocated memory: 1 to 2 % simulated for BERT, 24 %
for a Llama with 1B parameters and checkpointing."""

_SEGMENT_BYTES = 20 * MIB
"""Smallest segment of the allocator beyond 1 MiB: torch's c10/cuda/CUDACachingAllocator."""

PYTHON_BYTES = GIB // 2
"""Bytes of CPU memory per process before its first tensor: Python, torch and kernels took 0.4 GB
(memory by stage, README.md), and more are loaded while a model is built."""

TRAINED = ("forward", "backward", "optimizer")
"""Phases of a step, to which a record's measured peak on a CPU refers."""


def forecast(plan: Plan, traced: components.Traced | None = None, not_traced: str = "") -> Forecast:
    """Return the forecast on the plan's (first) device, by a trace or with why there is none."""
    found = moments(plan)
    method, doubts = Method.closed_form, components.uncertainty_reasons(plan)
    substitutions: tuple[str, ...] = ()
    # ZeRO-3's linear layers keep other tensors than the traced ones (see moments.kept). On two
    # ranks, formulas were right to 5 %, the trace to 16 % (notes/lab/memory.md).
    if traced is not None and plan.ranks.zero_stage != 3:
        found = _refine_with_trace(plan, found, traced)
        method, substitutions = traced.method, traced.notes
        doubts = tuple(doubt for doubt in doubts if doubt in components.UNTRACED)
    # Formulas know nothing about own code but its parameters.
    is_open = "own_code" in doubts
    on_cpu = plan.device.kind == "cpu"
    measured = [m for m in found if m.phase in TRAINED or not on_cpu]
    allocated = _highest_range(moment.tensors for moment in measured)
    whole = found if on_cpu else [_on_gpu(plan, moment, found) for moment in found]
    peak = _highest_range(moment.total for moment in whole)
    top = max(whole, key=lambda moment: moment.total.expected)
    capacity = available_bytes(plan)
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
            for phase in components.MEMORY_PHASES
        },
        components={
            name: top.parts[name].expected
            for name in sorted(top.parts, key=lambda name: (*COMPONENTS, name).index(name))
            if top.parts[name].expected
        },
        capacity=capacity,
        verdict=components.Verdict.unknown if is_open else verdict(peak, capacity),
        doubts=doubts,
        substitutions=substitutions,
        not_traced=not_traced,
    )


def allocated_of(plan: Plan, micro: MicroBatchShape) -> int:
    """Return the highest sum of tensors in a step of such micro-batches, by formulas."""
    found = memory_points(plan, micro)
    return max(each.tensors.expected for each in found if each.phase in TRAINED)


def _highest_range(moments: Iterable[Range]) -> Range:
    return Range(*map(max, zip(*map(astuple, moments), strict=True)))


def verdict(peak: Range, capacity: int | None) -> components.Verdict:
    """Return whether a peak fits into a number of bytes."""
    if capacity is None:
        return components.Verdict.unknown
    if peak.expected > capacity:
        return components.Verdict.does_not_fit
    return components.Verdict.fits if peak.high <= capacity else components.Verdict.tight


def available_bytes(plan: Plan) -> int | None:
    """Return the bytes of the device for one process, on a CPU without Python, None if unknown."""
    memory, left = plan.device.memory_bytes, plan.device.available_bytes
    if memory is None:
        return None
    free = memory if left is None else min(memory, left)
    if plan.device.kind != "cpu":
        return free
    return max(0, free // max(1, plan.processes_per_node) - PYTHON_BYTES)


def least_bytes(plan: Plan, found: Forecast) -> int:
    """Return the least device memory of a run in bytes, on a CPU for all its processes."""
    if plan.device.kind != "cpu":
        return found.peak.low
    return (found.peak.low + PYTHON_BYTES) * max(1, plan.processes_per_node)


def least_host_bytes(plan: Plan, found: Forecast, copies: bool = True) -> int:
    """Return the least host memory of a run in bytes, with `copies` also while it saves."""
    if plan.device.kind == "cpu":
        return least_bytes(plan, found)
    there, all_of_it = (
        shared_state_bytes(plan.config, plan.size, host, plan.compute) for host in (False, True)
    )
    offloaded = max(0, all_of_it.total - there.total)
    behind = copies and plan.config.train.checkpoint_async is not False
    copied = saved_bytes(plan) if behind else 0
    return (PYTHON_BYTES + offloaded + copied) * max(1, plan.processes_per_node)


def with_available_bytes(plan: Plan, size: int) -> Plan:
    """Return the plan on a device that has `size` bytes for each process's forecast."""
    memory = size
    if plan.device.kind == "cpu":
        memory = (size + PYTHON_BYTES) * max(1, plan.processes_per_node)
    return replace(plan, device=replace(plan.device, memory_bytes=memory, available_bytes=None))


def highest_phase(found: Forecast) -> str:
    """Return the phase of the expected peak."""
    return max(found.phases, key=lambda phase: found.phases[phase])


def _on_gpu(plan: Plan, moment: MemoryPoint, every: Sequence[MemoryPoint]) -> MemoryPoint:
    """Return a moment with cuBLAS's workspace, the allocator's reserve and the driver's context."""
    space = 0 if moment.phase == "load" else workspace_bytes(plan.device.capability)
    allocated, held = moment.total, 0
    if plan.ranks.fsdp:  # creates gradients on its own stream, whose memory is not shared
        gradients = [m.parts.get("gradients", ZERO_RANGE).expected for m in (moment, *every)]
        held = max(gradients) - gradients[0]
    reserve = range_around(
        0,
        int(allocated.expected * _RESERVE_SHARE[0]) + _SEGMENT_BYTES + held,
        int(allocated.high * _RESERVE_SHARE[1]) + 4 * _SEGMENT_BYTES + held,
    )
    parts = {
        "workspace": range_around(0, space, 3 * space),
        "reserve": reserve,
        "context": _CONTEXT,
    }
    # A traced moment already has its reserve.
    return replace(moment, parts=parts | moment.parts)


def known_forecast(plan: Plan) -> Forecast:
    """Return the forecast by a cached trace, else by formulas. No process is started."""
    return forecast(plan, trace_client.find_trace(trace_client.trace_key(plan)))


def traced_forecast(plan: Plan) -> Forecast:
    """Return the forecast by a trace, made now if needed, else by formulas with the reason."""
    answer = trace_client.get_or_run_trace(plan)
    return forecast(plan, answer.traced, answer.reason)


def traced_forecasts(
    plans: Sequence[Plan], progress: Callable[[int, int], Any], processes: int
) -> list[Forecast]:
    """Return the forecasts of many plans, each trace made once. Arguments as in `trace_all`."""
    answers = trace_client.trace_all(plans, progress, processes)
    return [forecast(p, each.traced, each.reason) for p, each in zip(plans, answers, strict=True)]


def needs_trace(found: Forecast) -> bool:
    """Return whether formulas cannot decide the fit, so that a trace is worthwhile."""
    if found.method is not Method.closed_form or found.capacity is None:
        return False
    # Without formulas for an encoder-decoder, not even its layers are known.
    if {"architecture", "own_code"}.intersection(found.doubts):
        return True
    return found.peak.low <= found.capacity < found.peak.high
