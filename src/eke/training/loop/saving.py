"""Saving of checkpoints between two steps, or in the background of the next steps.

A background save copies each rank's part to the host during the next step's passes, which only read
it, and a thread writes the copy. Each rank reports in a step's totals whether its thread has
finished. After all have, the ranks gather file names or errors, and rank 0 renames the folder.
"""

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

from eke.common.files import remove_tree, replace_link
from eke.common.paths import EXPORT, RunPaths, checkpoint_name
from eke.training.checkpoint import (
    Saving,
    begin_checkpoint,
    finish_checkpoint,
    together,
    unfinished_folder,
    write_whole,
)
from eke.training.loop.evaluation import best_so_far
from eke.training.loop.meter import capture_random_state
from eke.training.loop.training_state import TrainingState
from eke.training.model.save_parts import save_settings, save_weights
from eke.training.part_files import PartFiles


def save(job: TrainingState, step: int, exports: bool = False) -> None:
    """Write a checkpoint, or begin to. Raises OSError on all ranks if it or the last one failed."""
    finish_saving(job)  # one checkpoint at a time, and its failure is reported here
    start = time.perf_counter()
    job.meter.leave("checkpoint")
    ranks, best = job.ranks, best_so_far(job)
    states, pids = zip(*ranks.gather((capture_random_state(), os.getpid())), strict=True)
    unfinished = unfinished_folder(job.paths.checkpoints, step, pids[0])
    spare = best.step if best else None
    saving = Saving(step, spare, job.plan.run_id, unfinished, exports)
    scaler = getattr(job.update, "scale", None) or job.formats.scaler

    def prepare() -> None:
        if ranks.is_main:
            begin_checkpoint(unfinished)
            job.callbacks.save(unfinished)
        held = saving.held = job.update.hold(job.bare_model)
        if held is not None:
            mine = {n: s for n, s in enumerate(states) if n % held.world_size == held.rank}
            held.notes |= {"random": mine, "scaler": scaler.state_dict() if scaler else {}}
        elif ranks.is_main:
            state = job.bare_model, job.optimizer, scaler, states, job.tokenizer
            write_whole(unfinished, *state)

    # A failure on one rank stops all ranks, which would otherwise wait for it.
    _on_ranks(job, saving, prepare)
    saving.exports = exports and saving.held is not None
    in_parts = saving.held is not None and ranks.world_size > 1
    job.meter.is_saving = in_parts and job.plan.config.train.checkpoint_async is not False
    job.saving = saving
    if job.meter.is_saving:
        Thread(target=saving.write, daemon=True).start()
        job.checkpoint_s += time.perf_counter() - start
    else:
        saving.copied.set()
        saving.write()
        job.checkpoint_s += time.perf_counter() - start
        finish_saving(job)


def _on_ranks(job: TrainingState, saving: Saving, action: Callable[[], Any] | None) -> list[Any]:
    """Return results of all ranks. If one fails, rank 0 removes the files and all raise."""
    try:
        final = job.paths.checkpoints / checkpoint_name(saving.step)
        return together(job.ranks, final, action)
    except BaseException:
        if job.ranks.is_main:
            remove_tree(saving.unfinished)
        raise


def await_copy(job: TrainingState) -> None:
    """Wait until the state has been copied, so that the optimizer may change it."""
    if job.saving is not None and not job.saving.copied.is_set():
        start = time.perf_counter()
        job.saving.copied.wait()
        job.checkpoint_s += time.perf_counter() - start


def progress(job: TrainingState) -> int:
    """Return 1 when this rank has written its part, the number of ranks if that failed, else 0."""
    if job.saving is None or not job.saving.written.done():
        return 0
    return job.ranks.world_size if job.saving.written.exception() else 1


def finish_saving(job: TrainingState) -> None:
    """Wait until all ranks have written the checkpoint, if any, and rename it. Raises OSError."""
    saving, job.saving = job.saving, None
    if saving is None:
        return
    start = time.perf_counter()
    ranks, unfinished = job.ranks, saving.unfinished

    def export(write: Callable[..., None], *how: Any) -> None:
        write(job.bare_model, PartFiles(unfinished), unfinished / EXPORT, *how)

    def conclude() -> None:
        files = {name: each for one in written for name, each in one.items()}
        keep = job.plan.config.train.keep_checkpoints
        finish_checkpoint(unfinished, saving.step, keep, saving.spare, ranks.world_size, files)
        _link_model(job.paths, saving.spare or saving.step)

    written = _on_ranks(job, saving, saving.written.result)
    if saving.exports:
        settings = partial(export, save_settings, job.tokenizer) if ranks.is_main else None
        _on_ranks(job, saving, settings)
        _on_ranks(job, saving, partial(export, save_weights, ranks.rank, ranks.world_size))
    _on_ranks(job, saving, conclude if ranks.is_main else None)
    job.meter.is_saving = False
    job.checkpoint_s += time.perf_counter() - start


def _link_model(paths: RunPaths, step: int) -> None:
    """Link `model` in the run folder to the newest or best export."""
    target = paths.exported(step)
    with contextlib.suppress(OSError):  # the file system may not support links
        if target.is_dir() and (not paths.model.exists() or paths.model.is_symlink()):
            replace_link(paths.model, str(target.relative_to(paths.folder)))
