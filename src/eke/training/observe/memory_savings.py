"""Whether the techniques against memory did anything: read from counters of the running objects.

What can do nothing on a CPU, a rule has warned about before the start.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from eke.config.schema import Checkpointing
from eke.training.loop.state import Job
from eke.training.model.activation_offload import ActivationOffload
from eke.training.model.checkpointing import LayerCalls
from eke.training.model.recomputation import RecomputationProbe


def note_recomputation(job: Job, calls: LayerCalls, probe: RecomputationProbe, num: int) -> None:
    """What the first step computed twice; `num` is its number of micro-batches."""
    memory = job.plan.config.memory
    recomputed, wanted = calls.recomputed(num), 0
    if memory.checkpointing is not Checkpointing.off:
        wanted = len(range(0, len(calls.counts), memory.every_n))
    job.effective["layer_calls_per_micro_batch"] = calls.mean / num
    job.effective["layers_recomputed"] = recomputed
    job.effective["operations_recomputed_per_micro_batch"] = probe.num_operations / num
    job.effective["matmuls_recomputed_per_micro_batch"] = probe.num_dear / num
    if recomputed < wanted and not recomputed:
        job.warn("memory.checkpointing had no effect: no layer's forward pass was repeated")
    elif recomputed != wanted:
        job.warn(f"memory.checkpointing repeated {recomputed} layers instead of {wanted}")
    elif memory.checkpointing is Checkpointing.selective and probe.num_dear:
        job.warn(
            f"memory.checkpointing=selective repeated {probe.num_dear} matrix multiplications and "
            "attention kernels that it should have kept"
        )
    elif memory.checkpointing is Checkpointing.full and not probe.num_dear:
        job.warn("memory.checkpointing=full repeated no matrix multiplication")


@contextmanager
def count_optimizer_calls(job: Job) -> Iterator[None]:
    """Count the optimizer's steps inside the backward pass of one training step."""
    phases: Counter[str] = Counter()

    def count(*_: Any) -> None:
        phases[job.meter.phase] += 1

    handle = job.optimizer.register_step_post_hook(count)
    try:
        yield
    finally:
        handle.remove()
    job.effective["optimizer_steps_in_backward"] = phases["backward"]
    if job.plan.config.memory.optimizer_in_backward and not phases["backward"]:
        job.warn("memory.optimizer_in_backward had no effect: no weight was updated in backward")


def note_offload(job: Job) -> None:
    """Bytes that have left the device by the end of the second step."""
    if not job.plan.config.memory.activation_offload:
        return
    moved = job.offload.bytes_moved if isinstance(job.offload, ActivationOffload) else 0
    job.effective["activation_bytes_offloaded"] = moved
    if not moved and job.device.type != "cpu":
        job.warn("memory.activation_offload had no effect: nothing was moved to the host")


def note_cache_release(job: Job) -> None:
    """Times the allocator was emptied in the whole attempt."""
    every = job.plan.config.memory.empty_cache_every
    if every is None:
        return
    calls = job.effective["empty_cache_calls"] = job.cache_release.calls
    if not calls and job.device.type != "cpu":
        job.warn("memory.empty_cache_every had no effect: the allocator was never emptied")
