"""Checkpoints of a model and an optimizer of one process, as a run would write and read them."""

import os
from pathlib import Path

from eke.common.files import remove_tree
from eke.common.paths import checkpoint_name
from eke.training import checkpoint
from eke.training.distributed.ranks import SINGLE_PROCESS
from eke.training.loop.meter import capture_random_state


def save_checkpoint(folder, step, model, optimizer, scaler, keep, random_states=()) -> Path:
    """Write a checkpoint of `step`; all but the newest `keep` go."""
    unfinished = checkpoint.unfinished_folder(folder, step, os.getpid())
    states = list(random_states) or [capture_random_state()]

    def write() -> Path:
        checkpoint.begin_checkpoint(unfinished)
        checkpoint.write_whole(unfinished, model, optimizer, scaler, states)
        return checkpoint.finish_checkpoint(unfinished, step, keep)

    try:
        return checkpoint.together(SINGLE_PROCESS, folder / checkpoint_name(step), write)[0]
    except BaseException:
        remove_tree(unfinished)
        raise


def load_checkpoint(path, model, optimizer, scaler, *rest) -> int:
    """Restore all of a checkpoint; returns its step."""
    checkpoint.load_model(path, model)
    return checkpoint.load_checkpoint(path, model, optimizer, scaler, *rest)
