"""Saving a checkpoint between two steps, or beside the next ones.

A background save copies parts to the host during the next step's passes, which only read them, and
writes them from a thread. The thread talks to no other rank: each rank adds to a step's totals
whether its thread is done, and once all are, they together gather what was written or what failed,
and rank 0 names the folder.
"""

import contextlib
import os
import time
from concurrent.futures import Future
from contextlib import nullcontext
from threading import Event, Thread

from eke.common.files import replace_link, write_json
from eke.common.paths import EXPORT, RunPaths, checkpoint_name
from eke.training.checkpoint import (
    STATE,
    Files,
    Saving,
    begin_checkpoint,
    finish_checkpoint,
    removed_on_error,
    together,
    unfinished_folder,
    write_held,
    write_whole,
)
from eke.training.loop.evaluation import best_so_far
from eke.training.loop.meter import capture_random_state
from eke.training.loop.training_state import TrainingState
from eke.training.model.save_parts import save_from_parts
from eke.training.part_files import PartFiles


def save(job: TrainingState, step: int, exports: bool = False) -> None:
    """Write a checkpoint, or begin to: rank 0 if it has all, else each rank its part.

    Raises OSError, on all ranks alike: one could not write this checkpoint or the one before.
    """
    finish_saving(job)
    start = time.perf_counter()
    job.meter.leave("checkpoint")
    ranks, final = job.ranks, job.paths.checkpoints / checkpoint_name(step)
    states, pids = zip(*ranks.gather((capture_random_state(), os.getpid())), strict=True)
    unfinished = unfinished_folder(final.parent, step, pids[0])
    best = best_so_far(job)

    def prepare() -> None:
        if ranks.is_main:
            begin_checkpoint(unfinished)
        held, background = job.update.hold(job.bare_model), job.plan.config.train.checkpoint_async
        if background is None:
            background = held is not None and ranks.world_size > 1
        scaler = getattr(job.update, "scale", None) or job.formats.scaler
        copied = Event()
        if held is None or not background:
            copied.set()
        if held is not None:
            mine = {n: s for n, s in enumerate(states) if n % held.world_size == held.rank}
            held.notes |= {"random": mine, "scaler": scaler.state_dict() if scaler else {}}
            write = write_held(unfinished, held, job.plan.run_id, copied)
        elif ranks.is_main:
            state = job.bare_model, job.optimizer, scaler, states, job.tokenizer, background
            write = write_whole(unfinished, step, *state)
        else:
            write = dict
        spare, puts_together = best.step if best else None, exports and held is not None
        writing = copied, write, Future[Files]()
        job.saving = Saving(step, spare, unfinished, puts_together, background, *writing)

    with removed_on_error(unfinished) if ranks.is_main else nullcontext():
        together(ranks, final, prepare)
    assert job.saving is not None
    thread = Thread(target=_fulfil, args=(job.saving,), daemon=True)
    if job.saving.background:
        thread.start()
    else:
        thread.run()
    job.meter.is_saving = job.saving.background
    job.checkpoint_s += time.perf_counter() - start
    if not job.saving.background:
        finish_saving(job)


def _fulfil(saving: Saving) -> None:
    try:
        saving.written.set_result(saving.write())
    except BaseException as error:
        saving.written.set_exception(error)
    finally:
        saving.copied.set()


def await_copy(job: TrainingState) -> None:
    """Wait until the optimizer may change the state: a step's passes only read it."""
    if job.saving is not None and not job.saving.copied.is_set():
        start = time.perf_counter()
        job.saving.copied.wait()
        job.checkpoint_s += time.perf_counter() - start


def progress(job: TrainingState) -> int:
    """1 once this rank has written; if that failed, enough for all to look at it."""
    if job.saving is None or not job.saving.written.done():
        return 0
    return job.ranks.world_size if job.saving.written.exception() else 1


def finish_saving(job: TrainingState) -> None:
    """Wait until all ranks have written what is being saved, if anything is, and give it its name.

    Raises OSError, on all ranks alike: one could not write; earlier checkpoints are untouched.
    """
    saving, job.saving = job.saving, None
    if saving is None:
        return
    start = time.perf_counter()
    ranks, final = job.ranks, job.paths.checkpoints / checkpoint_name(saving.step)

    def export() -> None:
        parts, folder = PartFiles(saving.unfinished), saving.unfinished / EXPORT
        mine = ranks.rank, ranks.world_size
        save_from_parts(job.bare_model, parts, folder, job.tokenizer, *mine)

    def conclude() -> None:
        files = {name: each for one in written for name, each in one.items()}
        if STATE not in files:
            said = {"step": saving.step, "world_size": ranks.world_size}
            write_json(saving.unfinished / STATE, said)
        keep = job.plan.config.train.keep_checkpoints
        finish_checkpoint(saving.unfinished, saving.step, keep, saving.spare, files)
        link_model(job.paths, saving.spare or saving.step)

    with removed_on_error(saving.unfinished) if ranks.is_main else nullcontext():
        written = together(ranks, final, saving.written.result)
        if saving.exports:
            together(ranks, final, export)
        together(ranks, final, conclude if ranks.is_main else lambda: None)
    job.meter.is_saving = False
    job.checkpoint_s += time.perf_counter() - start


def link_model(paths: RunPaths, step: int) -> None:
    """`model` in the run folder is a name to load that stays: of the newest export, or the best."""
    target = paths.exported(step)
    with contextlib.suppress(OSError):  # a file system without links: the folder has a name, too
        if target.is_dir() and (not paths.model.exists() or paths.model.is_symlink()):
            replace_link(paths.model, str(target.relative_to(paths.folder)))
