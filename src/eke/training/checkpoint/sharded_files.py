"""Checkpoints that every rank writes its part of: one folder, one manifest, complete or not there.

Rank 0 writes the weights in the hub's layout, as for any run, each rank its part of the optimizer
state and its random states, and rank 0 gives the folder its name once all have written. Whatever
fails on one rank is raised on all; a rank that is killed leaves the checkpoint before as it was.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from eke.common.errors import RunError
from eke.common.files import read_json, write_json
from eke.training.checkpoint.checkpoint import (
    EXPORT,
    STATE,
    begin_checkpoint,
    checkpoint_name,
    finish_checkpoint,
    part_name,
    removed_on_error,
    translated_errors,
    unfinished_folder,
)
from eke.training.distributed.ranks import Ranks
from eke.training.loop.random_state import capture_random_state, restore_random_state
from eke.training.model.export import save_pretrained


@runtime_checkable
class HoldsPart(Protocol):
    """An update whose rank holds a part of the training state."""

    def weights(self, keep: bool) -> dict[str, Tensor] | None:
        """All weights where `keep`, None where the model has them; every rank must call it."""

    def part(self) -> dict[str, Any]:
        """This rank's part but for the weights: tensors, numbers, lists and dictionaries."""

    def load_part(self, part: dict[str, Any]) -> None:
        """Continue from what `part` gave."""


def save_parts(
    folder: Path,
    step: int,
    model: nn.Module,
    update: HoldsPart,
    keep: int,
    ranks: Ranks,
    tokenizer: Any = None,
) -> None:
    """Write a checkpoint of all ranks together and drop all but the newest `keep` complete ones.

    Args:
        folder: where checkpoints are; all ranks see the same.
        step: optimizer steps done.
        model: without wrappers.
        update: holds this rank's part.
        keep: complete checkpoints to leave.
        ranks: every one of them must call this.
        tokenizer: of transformers, to lie beside the weights.

    Raises:
        OSError: the disk is full, for one of the ranks; earlier checkpoints are untouched.
    """
    unfinished = unfinished_folder(folder, step, ranks.tell(os.getpid()))
    weights = update.weights(keep=ranks.is_main)

    def write_weights() -> None:
        begin_checkpoint(unfinished)
        save_pretrained(model, unfinished / EXPORT, tokenizer, weights=weights)
        write_json(unfinished / STATE, {"step": step, "world_size": ranks.world_size})

    def write_part() -> None:
        content = {**update.part(), "random": capture_random_state()}
        # Opened here: a file that torch opens loses the system's error.
        with open(unfinished / part_name(ranks.rank, ranks.world_size), "wb") as file:
            torch.save(content, file)

    def finish() -> None:
        finish_checkpoint(unfinished, step, keep)

    final = folder / checkpoint_name(step)
    with removed_on_error(unfinished) if ranks.is_main else nullcontext():
        _together(ranks, final, write_weights if ranks.is_main else _nothing)
        _together(ranks, final, write_part)
        _together(ranks, final, finish if ranks.is_main else _nothing)


def load_part(path: Path, update: HoldsPart, ranks: Ranks) -> int:
    """Restore this rank's part, its random states last; returns the steps it was taken after.

    Raises:
        RunError: another number of processes wrote the checkpoint.
    """
    state = read_json(path / STATE)
    written_by = int(state.get("world_size", 0))
    if written_by != ranks.world_size:
        raise RunError(
            f"{path}: {written_by or 'other'} processes wrote their parts of this checkpoint and "
            f"{ranks.world_size} read it; continue with distributed.num_processes={written_by}"
        )
    file = path / part_name(ranks.rank, ranks.world_size)
    part = torch.load(file, weights_only=True, map_location="cpu")
    update.load_part(part)
    restore_random_state(part["random"])
    return int(state["step"])


def _together(ranks: Ranks, final: Path, action: Callable[[], object]) -> None:
    """Run an action on every rank; a system's error of one is raised on all."""
    failed: OSError | None = None
    try:
        with translated_errors(final):
            action()
    except OSError as error:
        failed = error
    errors = ranks.gather(failed and (failed.errno, failed.strerror, failed.filename))
    if first := next(filter(None, errors), None):
        raise OSError(*first) from failed


def _nothing() -> None:
    """What the other ranks do meanwhile."""
