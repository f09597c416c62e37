"""A closer look at the first steps: what really runs, and how much memory one step takes.

Everything here is read from the running objects; nothing is copied from the request.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from eke.training.loop.state import Job
from eke.training.model.attention import KernelProbe
from eke.training.model.checkpointing import count_layer_calls
from eke.training.model.compile import is_compiled, num_graphs
from eke.training.model.recomputation import RecomputationProbe
from eke.training.observe.effects import (
    AFTER_WARM_UP,
    count_optimizer_calls,
    note_evaluation_formats,
    note_kernels,
    note_recomputation,
)
from eke.training.observe.memory import AllocationProfile, live_bytes


def closer_look(job: Job, nth: int) -> AbstractContextManager[None]:
    """Context of the nth step of this attempt: kernels in the first, a CPU's memory in one later.

    That is the one with the longest rows, the second where all are as long; once alone, since
    PyTorch's profiler counts addresses wrong that it knows from an earlier profile. docs/lab.md
    says what it costs. Compiled code is looked into as it runs, but for its layers' calls: hooks
    would be compiled with it. A step in which the compiler ran or memory was
    measured, at whatever point of the run, is marked: it is no steady step.
    """
    if nth > 1 and nth != job.longest and not is_compiled(job.plan):
        return nullcontext()  # as nearly every step
    return _closer_look(job, nth)


@contextmanager
def _closer_look(job: Job, nth: int) -> Iterator[None]:
    graphs = num_graphs(job.plan)
    if nth == 1 and job.device.type == "cpu":
        job.longest = job.data.longest_step(job.start_step + 1) - job.start_step
    profiled = nth == job.longest
    if nth == 0:
        with count_optimizer_calls(job), _look_at_operations(job):
            yield
    elif profiled:
        others = job.update.held()
        alive = live_bytes(job.bare_model, job.optimizer, others)
        with AllocationProfile(alive) as profile, _cut_by_micro_batch(job, profile):
            yield
        job.profiled_peak, job.profiled = profile.peak, job.largest
        if profile.problem:
            job.warn(f"peak memory of tensors was not measured: {profile.problem}")
    else:
        yield
    job.meter.notes[-1].unsteady = num_graphs(job.plan) != graphs or profiled
    if nth == 1:
        for note in AFTER_WARM_UP:
            note(job)


@contextmanager
def _cut_by_micro_batch(job: Job, profile: AllocationProfile) -> Iterator[None]:
    """Of a step that accumulates, each micro-batch is a piece of its own.

    Not of several processes where this thread alone counts: their exchanges free memory in others,
    also between two pieces (FSDP2 on two ranks came out 20 % too high).
    """
    if job.plan.batch.world_size > 1 and not profile.is_complete:
        yield
        return
    count = 0

    def watch(phase: str) -> None:
        nonlocal count
        count += phase == "forward"
        if phase == "forward" and count > 1:
            profile.cut()

    job.meter.watcher = watch
    try:
        yield
    finally:
        job.meter.watcher = None


@contextmanager
def look_at_evaluation(job: Job) -> Iterator[None]:
    """Context of a batch of evaluation: the first one of an attempt is looked at."""
    watchable = job.plan.config.compile.option == "none" and job.plan.batch.devices == 1
    if not watchable or "eval_matmul_dtypes" in job.effective:
        yield
        return
    with KernelProbe() as probe:
        yield
    note_evaluation_formats(job, probe.seen())


@contextmanager
def _look_at_operations(job: Job) -> Iterator[None]:
    """What the step computes with and what it computes twice; nothing where a compiler decides."""
    compiler = job.plan.config.compile.option
    if job.plan.batch.devices > 1:
        job.effective["not_looked_into"] = "formats, kernels: DataParallel runs in other threads"
        yield
        return
    if compiler != "none":
        # Its calls of kernels are seen; what it has fused away, or computes twice, is not.
        job.effective["not_looked_into"] = f"recomputation, fused kernels: compile={compiler}"
        with KernelProbe() as kernels:
            yield
        note_kernels(job, kernels.seen())
        return
    with (
        KernelProbe() as kernels,
        RecomputationProbe() as repeated,
        count_layer_calls(job.bare_model) as calls,
    ):
        yield
    num_micro_batches = sum(phase == "forward" for phase, _ in job.meter.notes[-1].stamps)
    note_kernels(job, kernels.seen())
    note_recomputation(job, calls, repeated, num_micro_batches)
