"""The record of an attempt: what the plan and the rows tell, and what the job's objects add."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from eke.common.paths import RunPaths
from eke.common.torch_compat import lacking
from eke.estimate.memory import note_measured_batch
from eke.estimate.time import note_predictions
from eke.hardware import environment
from eke.plan.identity import changed_fingerprint
from eke.plan.planner import Plan, outline_record, software_changes
from eke.plan.record import Failure, MeasuredMemory, Outcome, Record, metrics, read_attempts
from eke.training.loop.process_info import process_peak
from eke.training.loop.state import Job
from eke.training.model.compile import compile_report
from eke.training.observe.effects import AT_THE_END


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
    note_predictions(record, plan)
    if unreadable:
        record.warnings.append(f"{unreadable} torn lines in {paths.metrics.name}, from a kill")
    if job:
        for note in AT_THE_END:
            note(job)
        note_what_was_compiled(job)
        record.warnings += job.warnings
        record.timing.eval_s = job.eval_s
        record.timing.checkpoint_s = job.checkpoint_s
        record.memory.measured = measured_memory(job)
        note_measured_batch(record, plan, job.profiled)
        record.effective = effective(job)
        record.warnings += other_software(plan, read_attempts(paths))
        record.warnings += count_skipped(job, rows, record.effective)
        record.timing.compile_s = record.effective.get("compile", {}).get("compile_s")
    return record


def measured_memory(job: Job) -> MeasuredMemory:
    """Peak memory and the guides' stages."""
    if job.device.type == "cuda":
        return MeasuredMemory(
            basis="CUDA caching allocator, whole run; stages: memory in use on the GPU (NVML)",
            peak_allocated_bytes=largest(job, torch.cuda.max_memory_allocated(job.device)),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(job.device),
            process_peak_bytes=process_peak(),
            peak_per_rank_bytes=job.peaks,
            stages=dict(job.stages),
        )
    return MeasuredMemory(
        basis="CPU tensor allocator, one profiled step; stages: resident memory of the process",
        peak_allocated_bytes=largest(job, job.profiled_peak),
        process_peak_bytes=process_peak(),
        peak_per_rank_bytes=job.peaks,
        stages=dict(job.stages),
    )


def largest(job: Job, mine: int | None) -> int | None:
    """The highest peak of all ranks, or of those that were measured."""
    return max((peak for peak in [mine, *(job.peaks or [])] if peak is not None), default=None)


def effective(job: Job) -> dict[str, Any]:
    """What was read from the running objects."""
    found = dict(job.effective)
    found["device"] = str(next(job.bare_model.parameters()).device)
    if job.data.padding.frac is not None:
        found["padding_frac"] = job.data.padding.frac
    if job.formats.scaler:
        with contextlib.suppress(RuntimeError):  # after some errors CUDA answers nothing any more
            found["loss_scale"] = job.formats.scaler.get_scale()
    return found


def note_what_was_compiled(job: Job) -> None:
    """The compiler's own counters, which are PyTorch's affair: no run is lost for want of them."""
    if job.plan.config.compile.option == "none":
        return
    try:
        job.effective["compile"] = compile_report()
    except (ImportError, AttributeError, LookupError, TypeError) as error:
        job.warn(f"what was compiled is not known: {lacking(error) or error}")


def other_software(plan: Plan, attempts: Sequence[dict[str, Any]]) -> list[str]:
    """That attempts before this one had other software, or that it was changed meanwhile."""
    found = [f"changed since training began: {c}" for c in software_changes(plan)]
    for each in attempts:
        changes = changed_fingerprint(each.get("machine") or plan.machine, plan.machine)
        number, told = each.get("attempt"), "; ".join(changes)
        found += [f"attempt {number} ran with other software: {told}"] if changes else []
    return found


def count_skipped(job: Job, rows: Sequence[metrics.Row], found: dict[str, Any]) -> list[str]:
    """Put into `found` how many steps of the whole run the loss scaler skipped.

    Their gradients overflowed: the norm is not finite. Returns a warning where they are the rule.
    """
    if job.formats.scaler is None:
        return []
    norms = [row[metrics.GRAD_NORM] for row in metrics.latest(rows, metrics.LOSS)]
    skipped = sum(not math.isfinite(norm) for norm in norms)
    found["skipped_steps"] = skipped
    if skipped <= len(norms) / 2:
        return []
    return [
        f"{skipped} of {len(norms)} steps were skipped: their gradients overflowed float16 at "
        "every loss scale tried (precision=bf16)"
    ]
