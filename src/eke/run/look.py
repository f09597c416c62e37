"""A closer look at the first steps: what really runs, and how much memory one step takes.

Everything here is read from the running objects; nothing is copied from the request.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from eke.build.attention import KernelProbe, Seen
from eke.build.checkpointing import LayerCalls, count_layer_calls
from eke.build.compile import num_graphs
from eke.run.job import Job
from eke.run.memory import AllocationProfile, live_bytes


@contextmanager
def closer_look(job: Job, nth: int) -> Iterator[None]:
    """Context of the nth step of this attempt: kernels in the first, memory in the second.

    Both are warm-up steps; docs/lab.md says what they cost. Compiled models are not looked into:
    the probe would switch the compiler off. A step in which the compiler ran, at whatever point of
    the run, is marked: it is no steady step.
    """
    graphs = num_graphs(job.plan)
    if nth == 0 and job.plan.config.compile.option == "none":
        with KernelProbe() as probe, count_layer_calls(job.bare_model) as calls:
            yield
        note_kernels(job, probe.seen(), calls)
    elif nth == 1 and job.device.type == "cpu":
        with AllocationProfile(live_bytes(job.bare_model, job.optimizer)) as profile:
            yield
        job.profiled_peak = profile.peak
    else:
        yield
    job.meter.notes[-1].compiled = num_graphs(job.plan) != graphs
    if nth == 1:
        note_states(job)


def note_kernels(job: Job, seen: Seen, calls: LayerCalls) -> None:
    """What one step computed with, and a warning where that is not what was asked for."""
    plan = job.plan
    micro_batches = sum(phase == "forward" for phase, _ in job.meter.notes[-1].stamps)
    per_layer = min(calls.counts, default=0) / micro_batches
    job.effective["matmul_dtypes"] = list(seen.matmul_dtypes)
    job.effective["attention_kernels"] = list(seen.attention_kernels)
    job.effective["layer_calls_per_micro_batch"] = per_layer
    wanted = plan.compute.autocast or "float32"
    if wanted not in seen.matmul_dtypes:
        job.warn(
            f"precision={plan.choices.get('precision', '')} had no effect: matrix multiplications "
            f"ran in {', '.join(seen.matmul_dtypes) or 'nothing'}"
        )
    if plan.config.memory.checkpointing.value != "off" and per_layer < 2:
        job.warn("memory=checkpointing had no effect: no layer's forward pass was repeated")


def note_states(job: Job) -> None:
    """Formats of weights and the size of the optimizer's state, after the first full steps."""
    parameters = job.parameters
    states = [
        value
        for state in job.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    ]
    num_bytes = sum(t.numel() * t.element_size() for t in states)
    job.effective["weight_dtypes"] = sorted(
        {str(p.dtype).removeprefix("torch.") for p in parameters}
    )
    job.effective["optimizer"] = type(job.optimizer).__name__
    job.effective["optimizer_implementation"] = _implementation(job.optimizer)
    job.effective["optimizer_state_bytes"] = num_bytes
    job.effective["optimizer_bytes_per_parameter"] = num_bytes / sum(p.numel() for p in parameters)


def _implementation(optimizer: torch.optim.Optimizer) -> str:
    group: dict[str, Any] = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    if group.get("foreach"):
        return "foreach"
    return "forloop" if "foreach" in group else ""
