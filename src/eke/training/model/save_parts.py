"""A model in the Hub's layout out of a checkpoint in parts: no process holds more than one file.

transformers is imported inside the functions: naming a builder must not cost its import.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from eke.common.files import write_json
from eke.training.model.adapters import is_adapted
from eke.training.model.checkpointing import find_layers
from eke.training.model.save_model import INDEX, WEIGHTS, save_pretrained
from eke.training.part_files import SavedTensors

FILE_BYTES = 50 * 10**9
"""Largest file of weights: transformers 5's own."""


def save_from_parts(
    model: nn.Module,
    parts: SavedTensors,
    folder: Path,
    tokenizer: Any = None,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Write this rank's files of what `save_pretrained` writes of a whole model.

    All ranks together write everything, without a collective. A rank holds one file's tensors at a
    time: those of the model over `world_size`, or the largest unit that transformers converts.

    Args:
        model: as built, on any device: only its names, sizes and configuration are read.
        parts: weights under the names of its `state_dict`.
        folder: is made.
        tokenizer: a tokenizer of transformers, which rank 0 saves.
        rank: of this process.
        world_size: of those that write.

    Raises OSError: the disk is full or the folder cannot be written; what is there is incomplete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if is_adapted(model):
        if rank == 0:
            names = [name for name in parts.names if "@" not in name]
            weights = {name: parts.read_rows(name) for name in names}
            save_pretrained(model, folder, tokenizer, weights=weights)
        return
    files = _files(model, parts, world_size)
    names = [WEIGHTS]
    if len(files) > 1:
        names = [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    if rank == 0:  # transformers writes the configurations, and no file of no weights
        # In a folder apart: it removes files of weights that it does not write, as of other ranks.
        with tempfile.TemporaryDirectory(dir=folder) as apart:
            save_pretrained(model, Path(apart), tokenizer, weights={})
            for path in Path(apart).iterdir():
                path.rename(folder / path.name)
        _write_index(model, parts, dict(zip(names, files, strict=True)), folder)
    for number in range(rank, len(files), world_size):
        tensors = _converted(model, {name: parts.read_rows(name) for name in files[number]})
        save_file(tensors, folder / names[number], metadata={"format": "pt"})
        del tensors


def _files(model: nn.Module, parts: SavedTensors, world_size: int) -> list[list[str]]:
    """The names of each file's weights: whole units, and at most 1 / `world_size` of all bytes."""
    units = _units(model, parts)
    sizes = [sum(_empty(parts, name).nbytes for name in unit) for unit in units]
    limit = min(FILE_BYTES, -(-sum(sizes) // world_size))
    files: list[list[str]] = [[]]
    filled = 0
    for unit, size in zip(units, sizes, strict=True):
        if filled and filled + size > limit:
            files.append([])
            filled = 0
        files[-1] += unit
        filled += size
    return files


def _units(model: nn.Module, parts: SavedTensors) -> list[list[str]]:
    """Names of weights that are converted together: those of a layer, or one outside of them."""
    layers = {id(layer) for layer in find_layers(model)}
    prefixes = [f"{name}." for name, module in model.named_modules() if id(module) in layers]
    names = _saved_names(model)
    units: dict[str, list[str]] = {}
    for name in names:
        units.setdefault(next(filter(name.startswith, prefixes), name), []).append(name)

    def written(unit: list[str]) -> set[str]:
        return set(_converted(model, {name: _empty(parts, name) for name in unit}))

    alone: set[str] = set().union(*map(written, units.values()))
    return [*units.values()] if alone == written(names) else [names]


def _saved_names(model: nn.Module) -> list[str]:
    """Names of weights that transformers saves: of tied ones the one that it loads."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    mine: Any = model
    ignored = set(mine._keys_to_ignore_on_save or ())
    places: dict[int, Tensor] = {}  # one small tensor for each weight: it compares their memory
    found = {
        name: places.setdefault(id(tensor), torch.empty(1))
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in ignored
    }
    return list(remove_tied_weights_from_state_dict(found, mine))


def _empty(parts: SavedTensors, name: str) -> Tensor:
    return torch.empty(parts.shape(name), dtype=parts.dtype(name), device="meta")


def _converted(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names and in the shapes that transformers saves, such as of experts."""
    from transformers.core_model_loading import revert_weight_conversion

    mine: Any = model
    found: dict[str, Tensor] = revert_weight_conversion(mine, tensors)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _write_index(
    model: nn.Module, parts: SavedTensors, files: dict[str, list[str]], folder: Path
) -> None:
    if len(files) == 1:
        return
    where: dict[str, str] = {}
    size = 0
    for file, names in files.items():
        found = _converted(model, {name: _empty(parts, name) for name in names})
        where |= dict.fromkeys(found, file)
        size += sum(tensor.nbytes for tensor in found.values())
    count = sum(p.numel() for p in model.parameters())
    told = {"total_parameters": count, "total_size": size}
    write_json(folder / INDEX, {"metadata": told, "weight_map": dict(sorted(where.items()))})
