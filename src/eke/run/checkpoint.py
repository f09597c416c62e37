"""Checkpoints that continue bit for bit: weights, optimizer, loss scale and every random state.

A checkpoint is a folder that appears under its name only once it is complete: written beside it,
fsynced, listed with sizes and checksums, renamed. The order of samples and the learning rate are
functions of the step's number and need no saving. Weights are safetensors; the rest is loaded with
`weights_only`, so that no checkpoint can run code.
"""

import json
import logging
import os
import random
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_model, save_model
from torch import nn

from eke.files import fsync_directory, read_json, write_json

log = logging.getLogger(__name__)

MODEL, OPTIMIZER = "model.safetensors", "optimizer.pt"
STATE, MANIFEST = "state.json", "manifest.json"


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
) -> Path:
    """Write a checkpoint and drop all but the newest `keep` complete ones.

    Raises:
        OSError: the disk is full; earlier checkpoints are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / checkpoint_name(step)
    unfinished = folder / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        save_model(model, str(unfinished / MODEL))
        tensors = {
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler else {},
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        # Opened here: a file that torch opens loses the system's error.
        with open(unfinished / OPTIMIZER, "wb") as file:
            torch.save(tensors, file)
        write_json(unfinished / STATE, {"step": step, **_python_random_states()})
        write_json(unfinished / MANIFEST, _manifest(unfinished))
    except Exception as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        system = _system_error(error)
        if system is None:
            raise
        raise OSError(system.errno, system.strerror, str(final)) from error
    shutil.rmtree(final, ignore_errors=True)
    os.replace(unfinished, final)
    fsync_directory(folder)
    _prune(folder, keep)
    return final


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
) -> int:
    """Restore everything a complete checkpoint holds; returns the steps it was taken after."""
    load_model(model, path / MODEL, strict=True)
    tensors = torch.load(path / OPTIMIZER, weights_only=True, map_location="cpu")
    optimizer.load_state_dict(tensors["optimizer"])
    if scaler is not None and tensors["scaler"]:
        scaler.load_state_dict(tensors["scaler"])
    state = read_json(path / STATE)
    torch.set_rng_state(tensors["torch_rng"])
    if tensors["cuda_rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(tensors["cuda_rng"])
    version, internal, gauss = state["python_rng"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy_rng"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    return int(state["step"])


def newest_complete(folder: Path) -> Path | None:
    """The newest checkpoint whose files are all there, unharmed; damaged ones are skipped aloud."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        problem = find_damage(path)
        if not problem:
            return path
        log.warning("skipping checkpoint %s: %s", path.name, problem)
    return None


def find_damage(path: Path) -> str:
    """Why a checkpoint cannot be used; empty when it can."""
    try:
        manifest = read_json(path / MANIFEST)
        for name, (size, checksum) in manifest.items():
            file = path / name
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
            if _checksum(file) != checksum:
                return f"{name} is damaged (checksum)"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if {MODEL, OPTIMIZER, STATE} <= set(manifest) else "the manifest is incomplete"


def _system_error(error: BaseException) -> OSError | None:
    """The system's error behind one of a library, if there is one.

    torch 2.13 raises a RuntimeError while the OSError is being handled; safetensors 0.8 names the
    number, as Rust prints it.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return link
        link = link.__context__
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else None


def _manifest(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and checksum of each file, after making it durable."""
    content = {}
    for file in sorted(folder.iterdir()):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
        content[file.name] = (file.stat().st_size, _checksum(file))
    return content


def _checksum(path: Path) -> int:
    """CRC-32: for torn and rotten files, not against an adversary."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _prune(folder: Path, keep: int) -> None:
    for path in sorted(folder.glob("step-*"), reverse=True)[keep:]:
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _python_random_states() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    numbers = np.asarray(keys).tolist()
    state = {"python_rng": random.getstate(), "numpy_rng": [name, numbers, *rest]}
    plain: dict[str, Any] = json.loads(json.dumps(state))
    return plain
