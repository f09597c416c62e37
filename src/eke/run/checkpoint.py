"""Checkpoints that continue bit for bit: weights, optimizer, loss scale and every random state.

A checkpoint is a folder that appears under its name only once it is complete: written beside it,
fsynced, listed with sizes and checksums, renamed. The order of samples and the learning rate are
functions of the step's number and need no saving. Weights are safetensors; the rest is loaded with
`weights_only`, so that no checkpoint can run code.
"""

import logging
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eke.build.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from eke.build.export import CONFIG, INDEX, WEIGHTS, load_weights, save_pretrained, system_error
from eke.build.optimizer import evaluation_weights, restore_training_weights
from eke.build.sharding import WholeState, cut_optimizer
from eke.files import (
    fsync_directory,
    hold_folder,
    own_folder,
    read_json,
    remove_tree,
    write_json,
)
from eke.run.random_state import RandomState, capture_random_state, restore_random_state

log = logging.getLogger(__name__)

OPTIMIZER, STATE, MANIFEST = "optimizer.pt", "state.json", "manifest.json"
NAME = r"step-\d{8}"
"""What `checkpoint_name` makes."""
EXPORT = "model"
"""Folder of a checkpoint with what others load, in the hub's layout, and nothing else."""
PART = r"optimizer-\d{5}-of-(\d{5})\.pt"
"""Names that `part_name` makes."""


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


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
) -> Path:
    """Write a checkpoint and drop all but the newest `keep` complete ones.

    Args:
        folder: where checkpoints are.
        step: optimizer steps done.
        model: without wrappers.
        optimizer: of that model.
        scaler: of the loss, if there is one.
        keep: complete checkpoints to leave.
        random_states: one per rank; none takes this process's own.
        tokenizer: of transformers, to lie beside the weights.
        whole: what to write where model and optimizer only hold parts; None asks them.

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
        # Opened here: a file that torch opens loses the system's error.
        with open(unfinished / OPTIMIZER, "wb") as file:
            torch.save(tensors, file)
        write_json(unfinished / STATE, {"step": step})
        return finish_checkpoint(unfinished, step, keep)


def unfinished_folder(folder: Path, step: int, pid: int) -> Path:
    """Where the checkpoint of a process is written before it has its name."""
    return folder / f".{checkpoint_name(step)}.{pid}.tmp"


def begin_checkpoint(unfinished: Path) -> None:
    """An empty folder to write into."""
    own_folder(unfinished.parent)
    remove_tree(unfinished)
    unfinished.mkdir()


def finish_checkpoint(unfinished: Path, step: int, keep: int) -> Path:
    """Make all files durable and list them; only then the folder gets its name.

    Drops all but the newest `keep` complete checkpoints.
    """
    final = unfinished.parent / checkpoint_name(step)
    write_json(unfinished / MANIFEST, _manifest(unfinished))
    if final.is_dir() and not final.is_symlink():
        remove_tree(final)
    else:  # what a damaged file system may leave, and no folder can be named over
        final.unlink(missing_ok=True)
    os.replace(unfinished, final)
    fsync_directory(final.parent)
    _prune(final, keep)
    return final


@contextmanager
def removed_on_error(unfinished: Path) -> Iterator[None]:
    """Whatever fails leaves nothing behind."""
    try:
        yield
    except BaseException:
        remove_tree(unfinished)
        raise


@contextmanager
def translated_errors(final: Path) -> Iterator[None]:
    """A library's error about the disk becomes the system's, with the checkpoint's name."""
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
    state = read_json(path / STATE)
    return int(state["step"])


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore an optimizer in the formats it was saved in.

    torch 2.13 casts states to the format of their weight, which may be narrower: transformers'
    Adafactor keeps float32 beside bfloat16 weights.
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
    found = [p for p in folder.glob("step-*") if re.fullmatch(NAME, p.name)]
    return [path for path in found if not path.is_symlink()]


def newest_complete(folder: Path) -> Path | None:
    """The newest checkpoint whose files are all there, unharmed; damaged ones are skipped aloud."""
    for path in sorted(checkpoints_in(folder), reverse=True):
        problem = find_damage(path)
        if not problem:
            return path
        log.warning("skipping checkpoint %s: %s", path.name, problem)
    return None


def find_damage(path: Path) -> str:
    """Why a checkpoint cannot be used; empty when it can."""
    try:
        with hold_folder(path, own=True):
            manifest = read_json(path / MANIFEST)
        for name, (size, checksum) in manifest.items():
            file = path / name
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
            if _checksum(file) != checksum:
                return f"{name} is damaged (checksum)"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    kept = set(manifest)
    exported = {name.removeprefix(f"{EXPORT}/") for name in kept if "/" in name}
    model = CONFIG in exported and {WEIGHTS, INDEX} & exported
    adapter = {ADAPTER_CONFIG, ADAPTER_WEIGHTS} <= exported
    whole = (model or adapter) and STATE in kept and _has_optimizer(kept)
    return "" if whole else "the manifest is incomplete"


def part_name(rank: int, world_size: int) -> str:
    """File of one rank's part of the optimizer state."""
    return f"optimizer-{rank:05d}-of-{world_size:05d}.pt"


def _has_optimizer(names: set[str]) -> bool:
    """The optimizer state in one file, or every rank's part of it."""
    counts = [found[1] for name in names if (found := re.fullmatch(PART, name))]
    parts = {part_name(rank, int(counts[0])) for rank in range(int(counts[0]))} if counts else set()
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
    """CRC-32: for torn and rotten files, not against an adversary."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _prune(newest: Path, keep: int) -> None:
    """Drop what is older than the newest `keep`, counted from the one just written.

    One of a later step was skipped as damaged when this attempt began: it counts for nothing, or
    it would push out the only checkpoint that can be used.
    """
    folder = newest.parent
    mine = [path for path in checkpoints_in(folder) if (path / MANIFEST).is_file()]
    written = [path for path in mine if path.name <= newest.name]
    for path in sorted(written, reverse=True)[keep:]:
        remove_tree(path)
    for path in folder.glob(".step-*.tmp"):
        if re.fullmatch(rf"\.{NAME}\.\d+\.tmp", path.name):
            remove_tree(path)
