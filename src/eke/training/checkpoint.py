"""Bit-exact checkpoints: weights, optimizer, loss scale and every random state.

A checkpoint folder is written under a temporary name, fsynced, listed with sizes and checksums,
and renamed. The order of samples and the learning rate are functions of the step's number and need
no saving. Weights are safetensors; the rest is loaded with `weights_only`, so that no checkpoint
can run code.

Where each rank holds a part (DeepSpeed), rank 0 writes the weights, each rank its part of the
optimizer state and its random states, and rank 0 gives the folder its name once all have written.
Whatever fails on one rank is raised on all; a killed one leaves the checkpoint before as it was.
"""

import logging
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eke.common.errors import RunError
from eke.common.files import (
    fsync_directory,
    hold_folder,
    own_folder,
    read_json,
    remove_tree,
    write_json,
)
from eke.common.paths import CHECKPOINT_FILES, EXPORT, checkpoint_name
from eke.training.distributed.deepspeed_engine import DeepSpeedUpdate
from eke.training.distributed.fsdp import (
    WholeState,
    cut_optimizer,
)
from eke.training.distributed.ranks import Ranks
from eke.training.loop.meter import RandomState, capture_random_state, restore_random_state
from eke.training.model.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from eke.training.model.save_model import (
    CONFIG,
    INDEX,
    WEIGHTS,
    load_weights,
    save_pretrained,
    system_error,
)
from eke.training.optimizer.build_optimizer import evaluation_weights, restore_training_weights

log = logging.getLogger(__name__)

OPTIMIZER, STATE = "optimizer.pt", "state.json"
_NAME = r"step-\d{8}"
"""What `checkpoint_name` makes."""
_PART = r"optimizer-\d{5}-of-(\d{5})\.pt"
"""Names that `part_name` makes."""


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    keep: int,
    random_states: Sequence[RandomState] = (),
    tokenizer: Any = None,
    whole: WholeState | None = None,
    spare: int | None = None,
) -> Path:
    """Write a checkpoint, and drop all but the newest `keep` complete ones and that of `spare`.

    Of several ranks, `random_states` has one of each, and `whole` what to write where model and
    optimizer only hold parts. The model has no wrappers; `step` optimizer steps are done.

    Raises:
        OSError: the disk is full; earlier checkpoints are untouched.
    """
    unfinished = unfinished_folder(folder, step, os.getpid())
    with translated_errors(folder / checkpoint_name(step)), removed_on_error(unfinished):
        begin_checkpoint(unfinished)
        states = whole.optimizer if whole else optimizer.state_dict()
        switched = nullcontext(whole.training) if whole else evaluation_weights(optimizer)
        with switched as training_weights:
            weights = whole.weights if whole else None
            save_pretrained(model, unfinished / EXPORT, tokenizer, weights=weights)
        tensors = {
            "optimizer": states,
            "training_weights": training_weights,
            "scaler": scaler.state_dict() if scaler else {},
            "random": list(random_states) or [capture_random_state()],
        }
        _save_tensors(tensors, unfinished / OPTIMIZER)
        write_json(unfinished / STATE, {"step": step})
        return finish_checkpoint(unfinished, step, keep, spare)


def _save_tensors(content: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:  # a file that torch opens loses the system's error
        torch.save(content, file)


def unfinished_folder(folder: Path, step: int, pid: int) -> Path:
    """Temporary folder of a checkpoint."""
    return folder / f".{checkpoint_name(step)}.{pid}.tmp"


def begin_checkpoint(unfinished: Path) -> None:
    """Create an empty folder."""
    own_folder(unfinished.parent)
    remove_tree(unfinished)
    unfinished.mkdir()


def finish_checkpoint(unfinished: Path, step: int, keep: int, spare: int | None = None) -> Path:
    """Fsync and list all files, then rename the folder.

    Drops all but the newest `keep` complete checkpoints and that of the step `spare`.
    """
    final = unfinished.parent / checkpoint_name(step)
    write_json(unfinished / CHECKPOINT_FILES, _manifest(unfinished))
    if final.is_dir() and not final.is_symlink():
        remove_tree(final)
    else:  # what a damaged file system may leave, and no folder can be named over
        final.unlink(missing_ok=True)
    os.replace(unfinished, final)
    fsync_directory(final.parent)
    _prune(final, keep, spare)
    return final


@contextmanager
def removed_on_error(unfinished: Path) -> Iterator[None]:
    """Remove the temporary folder on errors."""
    try:
        yield
    except BaseException:
        remove_tree(unfinished)
        raise


@contextmanager
def translated_errors(final: Path) -> Iterator[None]:
    """Convert a library's disk error into an OSError with the checkpoint's name."""
    try:
        yield
    except Exception as error:
        system = system_error(error)
        if system is None:
            raise
        raise OSError(system.errno, system.strerror, str(final)) from error


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    rank: int = 0,
) -> int:
    """Restore everything a complete checkpoint holds; returns the steps it was taken after."""
    load_weights(model, path / EXPORT)
    tensors = torch.load(path / OPTIMIZER, weights_only=True, map_location="cpu")
    load_optimizer(optimizer, cut_optimizer(tensors["optimizer"], optimizer))
    restore_training_weights(optimizer, tensors["training_weights"])
    if scaler is not None and tensors["scaler"]:
        scaler.load_state_dict(tensors["scaler"])
    restore_random_state(tensors["random"][rank])
    return int(read_json(path / STATE)["step"])


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore an optimizer in the formats it was saved in.

    torch 2.13 casts states to the format of their weight, which may be narrower: transformers'
    Adafactor keeps float32 state for bfloat16 weights.
    """
    optimizer.load_state_dict(saved)
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for number, state in saved["state"].items():
        mine = optimizer.state[weights[number]]
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and mine[key].dtype != value.dtype:
                mine[key] = value.to(mine[key].device)


def checkpoints_in(folder: Path) -> list[Path]:
    """Folders and files with a checkpoint's name; links do not count."""
    found = [p for p in folder.glob("step-*") if re.fullmatch(_NAME, p.name)]
    return [path for path in found if not path.is_symlink()]


def newest_complete(folder: Path) -> Path | None:
    """Find the newest intact checkpoint; damaged ones are skipped with a warning."""
    for path in sorted(checkpoints_in(folder), reverse=True):
        problem = find_damage(path)
        if not problem:
            return path
        log.warning("skipping checkpoint %s: %s", path.name, problem)
    return None


def find_damage(path: Path) -> str:
    """Reason that a checkpoint is unusable; empty if it is intact."""
    try:
        with hold_folder(path, own=True):
            manifest = read_json(path / CHECKPOINT_FILES)
        for name, (size, checksum) in manifest.items():
            file = path / name
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
            if _checksum(file) != checksum:
                return f"{name} is damaged (checksum)"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    exported = {name.removeprefix(f"{EXPORT}/") for name in manifest if "/" in name}
    model = CONFIG in exported and {WEIGHTS, INDEX} & exported
    adapter = {ADAPTER_CONFIG, ADAPTER_WEIGHTS} <= exported
    whole = (model or adapter) and STATE in manifest and _has_optimizer(set(manifest))
    return "" if whole else "the manifest is incomplete"


def part_name(rank: int, world_size: int) -> str:
    """File of one rank's part of the optimizer state."""
    return f"optimizer-{rank:05d}-of-{world_size:05d}.pt"


def _has_optimizer(names: set[str]) -> bool:
    """The optimizer state in one file, or every rank's part of it."""
    counts = [int(found[1]) for name in names if (found := re.fullmatch(_PART, name))]
    parts = {part_name(rank, count) for count in counts[:1] for rank in range(count)}
    return OPTIMIZER in names or (bool(parts) and parts <= names)


def _manifest(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and checksum of each file, after making it durable."""
    content = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
        name = file.relative_to(folder).as_posix()
        content[name] = (file.stat().st_size, _checksum(file))
    fsync_directory(folder / EXPORT)
    return content


def _checksum(path: Path) -> int:
    """CRC-32, against truncation and corruption, not against an adversary."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _prune(newest: Path, keep: int, spare: int | None) -> None:
    """Drop what is older than the newest `keep`, counted from the one just written; but `spare`.

    One of a later step was skipped as damaged when this attempt began: it counts for nothing, or
    it would push out the only checkpoint that can be used.
    """
    folder = newest.parent
    mine = [path for path in checkpoints_in(folder) if (path / CHECKPOINT_FILES).is_file()]
    written = [path for path in mine if path.name <= newest.name]
    for path in sorted(written, reverse=True)[keep:]:
        if spare is None or path.name != checkpoint_name(spare):
            remove_tree(path)
    for path in folder.glob(".step-*.tmp"):
        if re.fullmatch(rf"\.{_NAME}\.\d+\.tmp", path.name):
            remove_tree(path)


def save_parts(
    folder: Path,
    step: int,
    model: nn.Module,
    update: DeepSpeedUpdate,
    keep: int,
    ranks: Ranks,
    tokenizer: Any = None,
    spare: int | None = None,
) -> None:
    """As `save_checkpoint`, by all ranks together, each of which writes its part of `update`."""
    unfinished = unfinished_folder(folder, step, ranks.tell(os.getpid()))
    weights = update.weights(keep=ranks.is_main)

    def write_weights() -> None:
        begin_checkpoint(unfinished)
        save_pretrained(model, unfinished / EXPORT, tokenizer, weights=weights)
        write_json(unfinished / STATE, {"step": step, "world_size": ranks.world_size})

    def write_part() -> None:
        content = {**update.part(), "random": capture_random_state()}
        _save_tensors(content, unfinished / part_name(ranks.rank, ranks.world_size))

    finish = partial(finish_checkpoint, unfinished, step, keep, spare)
    final = folder / checkpoint_name(step)
    with removed_on_error(unfinished) if ranks.is_main else nullcontext():
        _together(ranks, final, write_weights if ranks.is_main else None)
        _together(ranks, final, write_part)
        _together(ranks, final, finish if ranks.is_main else None)


def load_part(path: Path, update: DeepSpeedUpdate, ranks: Ranks) -> int:
    """Restore this rank's part, its random states last; returns the steps it was taken after."""
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


def _together(ranks: Ranks, final: Path, action: Callable[[], object] | None) -> None:
    """Run each rank's action, if it has one; a system's error of one is raised on all."""
    failed: OSError | None = None
    try:
        with translated_errors(final):
            if action is not None:
                action()
    except OSError as error:
        failed = error
    errors = ranks.gather(failed and (failed.errno, failed.strerror, failed.filename))
    if first := next(filter(None, errors), None):
        raise OSError(*first) from failed
