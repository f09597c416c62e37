"""The record of an attempt: what the plan and the rows tell, and what the job's objects add."""

from typing import Any

import torch

from eke.build.compile import compile_report
from eke.hardware import environment
from eke.paths import RunPaths
from eke.plan import Plan, outline_record
from eke.record import Failure, MeasuredMemory, MemoryRecord, Outcome, Record, metrics
from eke.run.job import Job
from eke.run.process import process_peak


def make_record(
    plan: Plan,
    paths: RunPaths,
    attempt: int,
    outcome: Outcome,
    failure: Failure | None,
    job: Job | None,
) -> Record:
    """What this attempt and the ones before it left; absent where nothing was measured."""
    rows, unreadable = metrics.read_rows(paths.metrics)
    record = outline_record(plan, rows, attempt, outcome, failure)
    record.environment = environment()
    if unreadable:
        record.warnings.append(f"{unreadable} torn lines in {paths.metrics.name}, from a kill")
    if job:
        record.warnings += job.warnings
        record.timing.eval_s = job.eval_s
        record.timing.checkpoint_s = job.checkpoint_s
        record.memory = MemoryRecord(measured=measured_memory(job))
        record.effective = effective(job)
        record.timing.compile_s = record.effective.get("compile", {}).get("compile_s")
    return record


def measured_memory(job: Job) -> MeasuredMemory:
    """Peak memory and the guides' stages."""
    if job.device.type == "cuda":
        return MeasuredMemory(
            basis="CUDA caching allocator, whole run; stages: memory in use on the GPU (NVML)",
            peak_allocated_bytes=torch.cuda.max_memory_allocated(job.device),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(job.device),
            process_peak_bytes=process_peak(),
            stages=dict(job.stages),
        )
    return MeasuredMemory(
        basis="CPU tensor allocator, one profiled step; stages: resident memory of the process",
        peak_allocated_bytes=job.profiled_peak,
        process_peak_bytes=process_peak(),
        stages=dict(job.stages),
    )


def effective(job: Job) -> dict[str, Any]:
    """What was read from the running objects."""
    found = dict(job.effective)
    found["device"] = str(next(job.bare_model.parameters()).device)
    if job.formats.scaler:
        found["loss_scale"] = job.formats.scaler.get_scale()
    if job.plan.config.compile.option != "none":
        found["compile"] = compile_report()
    return found
