"""Cheap check that the tensors of a checkpoint match its config.json.

Widths and depth are compared here, before anything is queued; every single tensor is compared when
the model is loaded.

Names and shapes of a checkpoint's tensors, from the headers of its safetensors files.

Format: eight bytes with the header's length, the header as JSON, the numbers.
Source: https://huggingface.co/docs/safetensors/index#format

What makes a checkpoint the same checkpoint: its content, wherever it lies.
"""

import json
import re
import shlex
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eke.common.errors import Fix
from eke.data.sources import files_digest
from eke.models.checkpoints.locate import CONFIG, KEY, Located, refuse
from eke.models.families.family_record import Sizes
from eke.models.families.registry import FAMILIES

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library takes: safetensors/src/tensor.rs, MAX_HEADER_SIZE."""

CHUNK = 1 << 24
"""Bytes of a tensor that are compared at once."""

Shapes = dict[str, tuple[int, ...]]


def weight_files(found: Located) -> list[Path]:
    """The files with the weights; none where a hub model's are not on this machine yet.

    Raises:
        ConfigError: a local folder has none, lacks one of several, or has another format's.
    """
    folder = found.folder
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return _shards(found)
    if not found.is_local:
        return []
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        why = f"has its weights in {pickled[0]}, which can run code when it is loaded"
        raise refuse(found.typed, why, Fix(remark=f"convert it once: {_conversion(found)}"))
    raise refuse(found.typed, f"has a config.json, but no {WEIGHTS}")


def _conversion(found: Located) -> str:
    code = (
        "from transformers import AutoConfig; import transformers as t; "
        f"f = {str(found.folder)!r}; c = AutoConfig.from_pretrained(f); "
        "getattr(t, c.architectures[0]).from_pretrained(f).save_pretrained('NEW_FOLDER')"
    )
    return f"python -c {shlex.quote(code)}   then {KEY}=NEW_FOLDER"


def _shards(found: Located) -> list[Path]:
    try:
        index = json.loads((found.folder / INDEX).read_text())
        names = sorted(set(index["weight_map"].values()))
        paths = [found.folder / name for name in names]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise refuse(found.typed, f"its {INDEX} cannot be read: {error}") from error
    absent = [path.name for path in paths if not path.is_file()]
    if absent and not found.is_local:
        return []  # the worker downloads the rest
    if absent:
        why = f"{len(absent)} of its {len(paths)} files of weights are missing: {absent[0]}"
        raise refuse(found.typed, why)
    return paths


def read_shapes(found: Located) -> Shapes:
    """Name -> shape of every tensor; empty where the weights are not on this machine yet.

    Raises:
        ConfigError: a file is missing, cut off or none of safetensors.
    """
    shapes: Shapes = {}
    for path in weight_files(found):
        header = _header(found, path)
        try:
            shapes |= {
                name: tuple(int(n) for n in tensor["shape"]) for name, tensor in header.items()
            }
            end = max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
        except (TypeError, KeyError, ValueError, IndexError) as error:
            raise refuse(found.typed, f"the header of its {path.name} is damaged") from error
        _check_length(found, path, end)
    return shapes


def same_numbers(found: Located, one: str, other: str) -> bool:
    """Whether two tensors of a checkpoint hold the same bytes."""
    places = []
    for path in weight_files(found):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
        header = _header(found, path)
        places += [(path, 8 + length, header[n]) for n in (one, other) if n in header]
    (path, start, first), (path_2, start_2, second) = places
    (low, high), (low_2, high_2) = first["data_offsets"], second["data_offsets"]
    if (first["dtype"], high - low) != (second["dtype"], high_2 - low_2):
        return False
    with open(path, "rb") as file, open(path_2, "rb") as file_2:
        for at in range(0, high - low, CHUNK):
            size = min(CHUNK, high - low - at)
            file.seek(start + low + at)
            file_2.seek(start_2 + low_2 + at)
            if file.read(size) != file_2.read(size):
                return False
    return True


def _header(found: Located, path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError("the header is too long")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return dict(header)
    except OSError as error:
        raise refuse(found.typed, f"its {path.name} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, AttributeError, TypeError, RecursionError) as error:
        why = f"its {path.name} is no safetensors file, or cut off ({path.stat().st_size} bytes)"
        if _first_bytes(path) == b"version":
            why = f"its {path.name} is a Git LFS pointer, not the weights"
            raise refuse(found.typed, why, Fix(remark="git lfs pull   (in its folder)")) from error
        raise refuse(found.typed, why) from error


def _first_bytes(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(7)


def _check_length(found: Located, path: Path, end: int) -> None:
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    wanted, there = 8 + length + end, path.stat().st_size
    if wanted != there:
        why = f"its {path.name} has {there} bytes instead of {wanted}: it was not copied whole"
        raise refuse(found.typed, why)


def compare(family: str, sizes: Sizes, shapes: Shapes, typed: str) -> None:
    """Refuse a config.json that is not of these tensors.

    Raises:
        ConfigError: the first size on which they disagree.
    """
    if not FAMILIES[family].is_known:
        return
    _check_heads(sizes, typed)
    if not shapes:
        return
    for what, said, found in _differences(family, sizes, shapes):
        why = f"its config.json says {what} = {said}, and its tensors {found}"
        raise refuse(typed, why, Fix(remark="the config.json that was saved with these weights"))


def _check_heads(sizes: Sizes, typed: str) -> None:
    """What transformers refuses, or fails at, when it builds the model."""
    heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
    groups = sizes.get("num_key_value_heads") or heads
    if width % heads and "gated" not in sizes:  # T5 alone has heads of any width
        why = f"its config.json has num_attention_heads = {heads}, no divisor of hidden_size"
        raise refuse(typed, f"{why} = {width}")
    if heads % groups:
        why = f"its config.json has num_key_value_heads = {groups}, no divisor of"
        raise refuse(typed, f"{why} num_attention_heads = {heads}")


def _differences(family: str, sizes: Sizes, shapes: Shapes) -> Iterator[tuple[str, object, str]]:
    names = FAMILIES[family]
    ending = names.embedding_tensor
    embedding = _ending(shapes, ending)
    if embedding is None or len(embedding) != 2:
        yield "model_type", family, f"have no matrix {ending}"
        return
    width, rows = sizes["hidden_size"], sizes["vocab_size"]
    if embedding[-1] != width:
        yield "hidden_size", width, f"are {embedding[-1]} wide"
    if embedding[0] != rows:
        yield "vocab_size", rows, f"have {embedding[0]} embeddings"
    numbers = [int(m[1]) for name in shapes if (m := re.search(names.layer_tensor, name))]
    depth = 1 + max(numbers, default=-1)
    if depth != sizes["num_hidden_layers"]:
        yield "num_hidden_layers", sizes["num_hidden_layers"], f"are of {depth} layers"
    inner = _ending(shapes, names.inner_tensor) if names.inner_tensor else None
    if inner is not None and inner != (sizes["intermediate_size"], width):
        yield "intermediate_size", sizes["intermediate_size"], f"are of {inner[0]}"


def _ending(shapes: Shapes, ending: str) -> tuple[int, ...] | None:
    return next((shape for name, shape in shapes.items() if name.endswith(ending)), None)


def content_of(found: Located) -> str:
    """`NAME@COMMIT` of a hub model; of a folder 16 hex digits over config.json and weights.

    Hashing gigabytes takes a while, so it is done once per path, size and times of change; a
    cache that cannot be written is done without.

    Raises:
        ConfigError: a file cannot be read.
    """
    if not found.is_local:
        return f"{found.typed}@{found.commit}"
    files = [found.folder / CONFIG, *weight_files(found)]
    try:
        return files_digest((path.name, path) for path in files)[:16]
    except OSError as error:
        raise refuse(
            found.typed, f"its {error.filename} cannot be read: {error.strerror}"
        ) from error
