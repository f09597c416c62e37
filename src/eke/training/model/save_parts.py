"""Export of a sharded checkpoint to the Hub's layout, one file per process at a time."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from eke.common.files import write_json
from eke.plan.planner import Plan
from eke.training.batches.dataset import load_plan_tokenizer
from eke.training.custom import is_plain
from eke.training.model.adapters import is_adapted
from eke.training.model.checkpointing import find_layers
from eke.training.model.save_model import (
    INDEX,
    build_trainable,
    save_pretrained,
    set_eos_token_ids,
    set_id2label,
)
from eke.training.part_files import PartFiles, SavedTensors
from eke.training.state_parts import named_weights

_FILE_BYTES = 50 * 10**9
"""Largest size of a weights file. The default of transformers 5."""

_AT_ONCE_BYTES = 4 * 10**9
"""Largest file that one process makes out of parts: a choice."""


def save_model(plan: Plan, checkpoint: Path, folder: Path) -> None:
    """Write the model of a checkpoint in parts in one process, a file at a time.

    Raises RunError: the parts are of another model; OSError: the disk is full.
    """
    parts = PartFiles(checkpoint)
    with torch.device("meta"):
        model, report = build_trainable(plan, torch.device("meta"))
    set_id2label(plan, model, report)
    set_eos_token_ids(plan, model)
    save_settings(model, parts, folder, load_plan_tokenizer(plan))
    size = sum(_empty(parts, name).nbytes for name in parts.names if "@" not in name)
    number = -(-size // _AT_ONCE_BYTES)
    for rank in range(number):
        save_weights(model, parts, folder, rank, number)


def save_settings(model: nn.Module, parts: SavedTensors, folder: Path, tokenizer: Any) -> None:
    """Write files other than weights, and adapters. Call it before any rank writes weights."""
    trained = [name for name in parts.names if "@" not in name] if is_adapted(model) else []
    weights = {name: parts.read(name) for name in trained}
    # transformers removes other files of weights.
    save_pretrained(model, folder, tokenizer, weights=weights)


def save_weights(
    model: nn.Module, parts: SavedTensors, folder: Path, rank: int, world_size: int
) -> None:
    """Write this rank's files of the model's weights, without a collective.

    A rank holds the tensors of one file: the model divided by `world_size`, or the largest unit of
    a conversion. `model`, on any device, provides names, sizes and configuration. Raises OSError.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    if is_adapted(model):
        return
    units = _units(model, parts)
    sizes = {unit: sum(_empty(parts, n).nbytes for n in names) for unit, names in units.items()}
    limit = min(_FILE_BYTES, -(-sum(sizes.values()) // world_size))
    with torch.device("meta"):
        each = {unit: torch.empty(size, dtype=torch.uint8) for unit, size in sizes.items()}
    split = split_torch_state_dict_into_shards(each, max_shard_size=limit)
    files = {
        file: [name for unit in mine for name in units[unit]]
        for file, mine in split.filename_to_tensors.items()
    }
    if rank == 0 and split.is_sharded:
        where = {n: file for file, mine in files.items() for n in _written(model, parts, mine)}
        index = {"metadata": split.metadata, "weight_map": dict(sorted(where.items()))}
        write_json(folder / INDEX, index)
    for file, mine in [*files.items()][rank::world_size]:
        tensors = _converted(model, {name: parts.read(name) for name in mine})
        save_file(tensors, folder / file, metadata={"format": "pt"})
        del tensors


def _units(model: nn.Module, parts: SavedTensors) -> dict[str, list[str]]:
    """Return names of weights that are converted together: of a layer, or single ones outside."""
    layers = {id(layer) for layer in find_layers(model)}
    prefixes = [f"{name}." for name, module in model.named_modules() if id(module) in layers]
    names = _saved_names(model)
    units: dict[str, list[str]] = {}
    for name in names:
        units.setdefault(next(filter(name.startswith, prefixes), name), []).append(name)
    alone = {name for unit in units.values() for name in _written(model, parts, unit)}
    return units if alone == _written(model, parts, names) else {"": names}


def _written(model: nn.Module, parts: SavedTensors, names: list[str]) -> set[str]:
    return set(_converted(model, {name: _empty(parts, name) for name in names}))


def _saved_names(model: Any) -> list[str]:
    """Return the weights that transformers saves, of tied weights the name that it loads."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    if is_plain(model):
        found, _ = named_weights(model)
        return sorted(found)
    ignored = set(model._keys_to_ignore_on_save or ())
    places: dict[int, Tensor] = {}  # one small tensor per weight, since it compares memory
    found = {
        name: places.setdefault(id(tensor), torch.empty(1))
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in ignored
    }
    return list(remove_tied_weights_from_state_dict(found, model))


def _empty(parts: SavedTensors, name: str) -> Tensor:
    return torch.empty(parts.shape(name), dtype=parts.dtype(name), device="meta")


def _converted(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the names and shapes that transformers saves (experts differ)."""
    from transformers.core_model_loading import revert_weight_conversion

    if is_plain(model):
        return {name: tensor.contiguous() for name, tensor in tensors.items()}
    found: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return {name: tensor.contiguous() for name, tensor in found.items()}
