"""Results of an attempt: record, tracker, model card, and merged adapters."""

import contextlib
import math
import resource
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from eke.common.files import write_atomic
from eke.common.paths import RunPaths
from eke.common.python_runtime import describe_missing_api
from eke.estimate.memory import note_measured_batch
from eke.hardware import environment
from eke.hardware.fingerprint import git_state, package_folder
from eke.plan.identity import changed_fingerprint
from eke.plan.planner import Plan, outline_record, remarks_on_cuts, software_changes
from eke.plan.record import (
    Failure,
    MeasuredMemory,
    Outcome,
    Record,
    cuts_of,
    metrics,
    read_attempts,
)
from eke.results.card import CARD, render_card
from eke.results.trackers import Tracker, build_tracker
from eke.results.trackers.tracker import tracked_run
from eke.training.loop.training_state import TrainingState
from eke.training.model.number_formats import compile_report
from eke.training.observe.memory_stages import device_peak
from eke.training.observe.observe_run import AT_THE_END
from eke.tuning.memory_advice import note_predictions


def make_record(
    plan: Plan,
    paths: RunPaths,
    attempt: int,
    outcome: Outcome,
    failure: Failure | None,
    job: TrainingState | None,
) -> Record:
    """Return the record of this attempt and the attempts before. Unmeasured values are absent."""
    rows, unreadable = metrics.read_rows(paths.metrics)
    record = outline_record(plan, rows, attempt, outcome, failure)
    record.environment = environment()
    note_predictions(record, plan)
    if unreadable:
        record.warnings.append(f"{unreadable} torn lines in {paths.metrics.name} (killed process)")
    if job:
        for note in AT_THE_END:
            note(job)
        if job.plan.config.compile.is_on:
            try:
                job.effective["compile"] = compile_report()
            except (ImportError, AttributeError, LookupError, TypeError) as error:
                # A run does not depend on PyTorch's private compiler counters.
                job.warn(f"compiler report not available: {describe_missing_api(error) or error}")
        record.warnings += job.warnings
        record.timing.eval_s, record.timing.checkpoint_s = job.eval_s, job.checkpoint_s
        measured, attempts = measured_memory(job), read_attempts(paths)
        record.effective, record.classes = effective(job), job.classes
        if metrics.num_cuts(rows) > 1:
            record.effective["cuts"] = _steps_by_division(rows, attempts, measured)
            said = remarks_on_cuts(plan), ["no speed or memory: its ranks or micro-batches changed"]
            record.warnings += {text: None for texts in said for text in texts}
        else:
            record.memory.measured = measured
            note_measured_batch(record, plan, job.profiled)
        record.warnings += other_software(plan, attempts)
        if job.formats.scaler:
            _note_skipped(record, rows)
        record.timing.compile_s = record.effective.get("compile", {}).get("compile_s")
    return record


def _steps_by_division(
    rows: Sequence[metrics.Row], attempts: Sequence[dict[str, Any]], last: MeasuredMemory
) -> list[dict[str, Any]]:
    """Return steps and step times of each batch division, and the peak memory of the last."""
    steps, found = metrics.latest(rows, metrics.LOSS), []
    for number, cut in enumerate(cuts_of(attempts)):
        mine = [row for row in steps if row.get(metrics.CUT, 0) == number]
        time = metrics.timing(mine).steady_step_s
        found.append({**cut, "steps": len(mine), "steady_step_s": time and asdict(time)})
        if cut == attempts[-1].get("cut"):
            found[-1]["peak_allocated_bytes"] = last.peak_allocated_bytes
    return found


def measured_memory(job: TrainingState) -> MeasuredMemory:
    """Return peak memory and the memory in use at each stage."""
    on_gpu = job.device.type == "cuda"
    basis = "CPU tensor allocator, one profiled step; stages: resident memory of the process"
    if on_gpu:
        basis = "CUDA caching allocator, whole run; stages: memory in use on the GPU (NVML)"
    peaks = [device_peak(job.device) or job.profiled_peak, *(job.peaks or [])]
    return MeasuredMemory(
        basis=basis,
        peak_allocated_bytes=max((peak for peak in peaks if peak is not None), default=None),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(job.device) if on_gpu else None,
        # Linux reports KiB.
        process_peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        peak_per_rank_bytes=job.peaks,
        stages=dict(job.stages),
    )


def effective(job: TrainingState) -> dict[str, Any]:
    """Return settings and values read from the running objects."""
    found = {**job.effective, "device": str(next(job.bare_model.parameters()).device)}
    if job.data.padding_frac is not None:
        found["padding_frac"] = job.data.padding_frac
    if job.plan.config.data.is_stream:
        found["rows_skipped"] = job.data.sums["skipped"]
    if job.formats.scaler:
        with contextlib.suppress(RuntimeError):  # after some errors CUDA does not answer
            found["loss_scale"] = job.formats.scaler.get_scale()
    return found


def other_software(plan: Plan, attempts: Sequence[dict[str, Any]]) -> list[str]:
    """Return warnings about software that changed between or during attempts."""
    found = [f"changed since training began: {c}" for c in software_changes(plan)]
    for each in attempts:
        changes = changed_fingerprint(each.get("machine") or plan.machine, plan.machine)
        number, listed = each.get("attempt"), "; ".join(changes)
        found += [f"attempt {number} ran with other software: {listed}"] if changes else []
    return found


def _note_skipped(record: Record, rows: Sequence[metrics.Row]) -> None:
    norms = [row[metrics.GRAD_NORM] for row in metrics.latest(rows, metrics.LOSS)]
    skipped = sum(not math.isfinite(norm) for norm in norms)
    record.effective["skipped_steps"] = skipped
    if skipped > len(norms) / 2:
        record.warnings.append(
            f"{skipped} of {len(norms)} steps were skipped: their gradients overflowed float16 at "
            "every loss scale tried (precision=bf16)"
        )


def open_tracker(plan: Plan, paths: RunPaths, attempt: int) -> Tracker:
    """Return the configured tracker. A tracker that fails does not fail the run."""
    record = outline_record(plan, (), attempt, Outcome.crashed, None)
    record.environment = {"git": git_state(package_folder())}
    return build_tracker(tracked_run(record, paths, attempt, plan.config.tracker))


def write_card(paths: RunPaths, record: Record) -> None:
    """Write the model card into the newest export of the run, if there is one."""
    real = paths.model.resolve()  # a link to a checkpoint of this run
    if real.is_dir() and real.is_relative_to(paths.folder.resolve()):
        write_atomic(real / CARD, render_card(record))
