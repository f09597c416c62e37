"""Bit-exact checkpoints: weights, optimizer, loss scale and all random states.

A checkpoint folder is written under a temporary name, fsynced, listed with sizes and checksums, and
renamed. A killed process does not change the checkpoint before. The order of samples and the
learning rate are functions of the step. Weights are safetensors and other state is loaded with
`weights_only`: a checkpoint cannot run code. With sharded state (FSDP2, ZeRO) each rank writes its
part.
"""

import logging
import os
import re
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import nn

from eke.common.errors import RunError
from eke.common.files import (
    fsync_directory,
    make_private_dir,
    open_trusted_dir,
    read_json,
    remove_tree,
    write_json,
)
from eke.common.paths import CHECKPOINT_FILES, EXPORT, checkpoint_name
from eke.training.distributed.deepspeed_engine import DeepSpeedUpdate
from eke.training.distributed.ranks import SINGLE_PROCESS, Ranks
from eke.training.loop.meter import RandomState, restore_random_state
from eke.training.model.number_formats import MASTER, copied_from
from eke.training.model.save_model import load_weights, save_pretrained, system_error
from eke.training.optimizer.build_optimizer import evaluation_weights, restore_training_weights
from eke.training.part_files import (
    Held,
    PartFiles,
    SavedTensors,
    part_name,
    why_incomplete,
    write_part,
)
from eke.training.state_parts import (
    Stepped,
    load_held,
    load_state,
    of_one_file,
    place_in,
    stepped_by,
)

_log = logging.getLogger(__name__)

OPTIMIZER, STATE = "optimizer.pt", "state.json"
_NAME = r"step-\d{8}"
"""Pattern of the names from `checkpoint_name`."""


_Files = dict[str, tuple[int, int]]
"""Size and checksum of each file, by its path in the checkpoint."""


@dataclass
class Saving:
    """Checkpoint that is being written, by each rank in parts or only by rank 0."""

    step: int
    spare: int | None
    """Step of another checkpoint that is kept."""
    run: str
    unfinished: Path
    exports: bool
    """True if parts are also exported as a model that transformers can load."""
    held: Held | None = None
    copied: Event = field(default_factory=Event)
    """Event set when the next update may change the saved state."""
    written: Future[_Files] = field(default_factory=Future)

    def write(self) -> None:
        """Write this rank's part. An error is raised by `written.result()`."""
        (held, self.held), files = (self.held, None), _Files()
        try:
            if held is not None and held.writes:
                if not self.copied.is_set():
                    for key, piece in held.pieces.items():
                        held.pieces[key] = replace(piece, tensor=piece.tensor.to("cpu", copy=True))
                    self.copied.set()
                name, origin = part_name(held.rank, held.world_size), self.unfinished.name
                files[name] = write_part(self.unfinished / name, held, f"{self.run} {origin}")
            self.written.set_result(files)
        except BaseException as error:
            self.written.set_exception(error)
        finally:
            self.copied.set()


def write_whole(
    unfinished: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    random_states: Sequence[RandomState],
    tokenizer: Any = None,
) -> None:
    """Write the state of a process that holds it all. `random_states` are in order of ranks."""
    tensors = {
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict() if scaler else {},
        "random": list(random_states),
    }
    with evaluation_weights(optimizer) as tensors["training_weights"]:
        save_pretrained(model, unfinished / EXPORT, tokenizer)
    with open(unfinished / OPTIMIZER, "wb") as file:  # torch would hide the error of its own file
        torch.save(tensors, file)


def unfinished_folder(folder: Path, step: int, pid: int) -> Path:
    """Return the temporary folder of a checkpoint."""
    return folder / f".{checkpoint_name(step)}.{pid}.tmp"


def begin_checkpoint(unfinished: Path) -> None:
    """Create an empty folder."""
    make_private_dir(unfinished.parent)
    remove_tree(unfinished)
    unfinished.mkdir()


def finish_checkpoint(
    unfinished: Path,
    step: int,
    keep: int,
    spare: int | None = None,
    world_size: int = 1,
    files: _Files | None = None,
) -> Path:
    """Sync and list files, rename the folder, and remove older ones but `keep` and `spare`."""
    final = unfinished.parent / checkpoint_name(step)
    write_json(unfinished / STATE, {"step": step, "world_size": world_size})
    manifest = dict(files or {})  # synced by those who wrote them
    for file in sorted(path for path in unfinished.rglob("*") if path.is_file()):
        if (name := file.relative_to(unfinished).as_posix()) not in manifest:
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
            manifest[name] = (file.stat().st_size, _checksum(file))
    if (unfinished / EXPORT).is_dir():
        fsync_directory(unfinished / EXPORT)
    write_json(unfinished / CHECKPOINT_FILES, manifest)
    if final.is_dir() and not final.is_symlink():
        remove_tree(final)
    else:  # a damaged file system may leave something that a folder cannot replace
        final.unlink(missing_ok=True)
    os.replace(unfinished, final)
    fsync_directory(final.parent)
    _prune(final, keep, spare)
    return final


def _has_parts(path: Path) -> bool:
    """Return whether each rank has written its part."""
    return next(path.glob("part-*"), None) is not None


def load_model(path: Path, model: nn.Module, ranks: Ranks = SINGLE_PROCESS) -> None:
    """Load a checkpoint's weights into a model, sharded or not. RunError: They do not match."""
    if not _has_parts(path):
        load_weights(model, path / EXPORT)
        return
    if len(set(together(ranks, path, lambda: PartFiles(path).note("origin")))) > 1:
        raise RunError(f"{path}: the processes of this run read different files")
    load_held(model, PartFiles(path))


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any = None,
    ranks: Ranks = SINGLE_PROCESS,
    seed: int = 0,
    update: DeepSpeedUpdate | None = None,
) -> int:
    """Restore the state other than weights, which `load_model` loads, and return its step.

    With DeepSpeed, `update` has made flat shards of the parameters. A rank without a saved random
    state uses `seed`. Raises RunError: Only the number of ranks that wrote it can read it.
    """
    is_whole = update is None and place_in(model)[1] == 1
    if is_whole and not _has_parts(path) and (path / OPTIMIZER).is_file():
        content = torch.load(path / OPTIMIZER, "cpu", weights_only=True)
        _load_optimizer(optimizer, content["optimizer"])
        restore_training_weights(optimizer, content["training_weights"])
        scales, states = content["scaler"], dict(enumerate(content["random"]))
    else:
        stepped = update.stepped(model) if update else stepped_by(model, optimizer)
        rank, world_size = (ranks.rank, ranks.world_size) if update else place_in(model)[:2]
        former = path / f"optimizer-{rank:05d}-of-{world_size:05d}.pt"
        found = _read_former(former) if update and former.is_file() else None
        saved, own, scales, states = found or _read(path, stepped, optimizer, rank, world_size)
        load_state(stepped, optimizer.state, saved, own)
        if update is None:
            for group, before in zip(optimizer.param_groups, saved.groups or (), strict=False):
                for key, value in before.items():  # a rate in a tensor is set before each step
                    if isinstance(value, int | float) and not torch.is_tensor(group.get(key)):
                        group[key] = value
            _load_optimizer(optimizer, optimizer.state_dict())  # moves states to their devices
    if scaler is not None and scales:
        scaler.load_state_dict(scales)
    step = int(read_json(path / STATE)["step"])
    if ranks.rank in states:
        restore_random_state(states[ranks.rank])
    else:
        set_seed(zlib.crc32(f"{seed} {step} {ranks.rank}".encode()))
    return step


_Found = tuple[SavedTensors, dict[str, Any], dict[str, Any], dict[int, RandomState]]
"""Optimizer state, a rank's own values, the loss scale, and random states by rank."""


def _read_former(path: Path) -> _Found:
    """Read a rank's flat shards in the format of ZeRO up to eke 0.10."""
    content = torch.load(path, "cpu", weights_only=True)
    own = {f"{n}@{k}": v for n, s in enumerate(content["optimizer"]) for k, v in s.items()}
    own |= {f"{n}@{MASTER}": tensor for n, tensor in enumerate(content["master"])}
    rank = int(path.name.split("-")[1])
    return SavedTensors({}, None), own, content["loss_scale"], {rank: content["random"]}


def _read(path: Path, stepped: list[Stepped], optimizer: Any, rank: int, world_size: int) -> _Found:
    wrote = int(read_json(path / STATE).get("world_size", 0))
    names = {id(each.parameter): [*each.cut(each.parameter)] for each in stepped}
    if _has_parts(path):
        parts = PartFiles(path)
        wrote, own = parts.world_size, parts.own(rank % parts.world_size)
        each = (parts.note("random", writer) for writer in range(wrote))
        states = {int(number): state for found in each for number, state in found.items()}
        if wrote == world_size or not own:
            return parts, own, parts.note("scaler"), states
    elif (path / OPTIMIZER).is_file():
        content = torch.load(path / OPTIMIZER, "cpu", weights_only=True, mmap=True)
        copied = [*chain(*(names[id(copy)] for copy in copied_from(optimizer)))]
        saved = of_one_file(content, [*chain(*names.values())], copied)
        return saved, {}, content["scaler"], dict(enumerate(content["random"]))
    raise RunError(
        f"{path}: its optimizer state needs the number of processes that wrote it, {wrote}\n"
        f"  -> distributed.num_processes={wrote}"
    )


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore an optimizer in the formats in which it was saved."""
    # torch 2.13 casts states to the format of their weight, which may be narrower: transformers'
    # Adafactor keeps float32 state for bfloat16 weights.
    optimizer.load_state_dict(saved)
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for number, state in saved["state"].items():
        mine = optimizer.state[weights[number]]
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and mine[key].dtype != value.dtype:
                mine[key] = value.to(mine[key].device)


def _checkpoints_in(folder: Path) -> list[Path]:
    """Return folders and files with a checkpoint's name, without links."""
    found = [p for p in folder.glob("step-*") if re.fullmatch(_NAME, p.name)]
    return [path for path in found if not path.is_symlink()]


def newest_complete(folder: Path) -> Path | None:
    """Find the newest intact checkpoint. Damaged ones are skipped with a warning."""
    for path in sorted(_checkpoints_in(folder), reverse=True):
        problem = find_damage(path)
        if not problem:
            return path
        _log.warning("skipping checkpoint %s: %s", path.name, problem)
    return None


def find_damage(path: Path) -> str:
    """Return why a checkpoint is unusable, "" if it is intact."""
    try:
        with open_trusted_dir(path, own=True):
            manifest = read_json(path / CHECKPOINT_FILES)
        for name, (size, checksum) in manifest.items():
            file = path / name
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
            if _checksum(file) != checksum:
                return f"{name} is damaged (checksum)"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    if _has_parts(path):
        return why_incomplete(manifest)
    whole = STATE in manifest and any(name.startswith("optimizer") for name in manifest)
    return "" if whole else "the manifest is incomplete"


def _checksum(path: Path) -> int:
    """Return a CRC-32, which detects truncation and corruption, but not manipulation."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _prune(newest: Path, keep: int, spare: int | None) -> None:
    """Remove checkpoints before `newest`, except the last `keep` and the one of step `spare`."""
    folder = newest.parent
    mine = [path for path in _checkpoints_in(folder) if (path / CHECKPOINT_FILES).is_file()]
    # Later ones were damaged when this attempt began. Do not count them as usable.
    written = [path for path in mine if path.name <= newest.name]
    for path in sorted(written, reverse=True)[keep:]:
        if spare is None or path.name != checkpoint_name(spare):
            remove_tree(path)
    for path in folder.glob(".step-*.tmp"):
        if re.fullmatch(rf"\.{_NAME}\.\d+\.tmp", path.name):
            remove_tree(path)


def together(ranks: Ranks, final: Path, action: Callable[[], Any] | None) -> list[Any]:
    """Return each rank's result of its action, if any. An error of one rank is raised on all."""
    result: Any = None
    failed: Exception | None = None
    try:
        result = action() if action else None
    except Exception as error:
        system = system_error(error)  # hidden by libraries
        failed = OSError(system.errno, system.strerror, str(final)) if system else error
    said: Any = failed and repr(failed)
    if isinstance(failed, OSError):
        said = failed.errno, failed.strerror, failed.filename
    answers = ranks.gather((said, result))
    if failed is not None:
        raise failed
    if first := next((said for said, _ in answers if said), None):
        raise OSError(*first) if isinstance(first, tuple) else RunError(f"another process: {first}")
    return [result for _, result in answers]
