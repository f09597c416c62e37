"""Cheap check that the tensors of a checkpoint match its config.json.

Widths and depth are compared here, before anything is queued; every single tensor is compared when
the model is loaded.

What makes a checkpoint the same checkpoint: its content, wherever it lies.
"""

import json
import mmap
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from eke.common.errors import Fix
from eke.data.sources import files_digest
from eke.models.checkpoints.locate import CONFIG, KEY, Located, refuse
from eke.models.families import FAMILIES
from eke.models.families.family_record import Sizes

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

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
    from safetensors import SafetensorError, safe_open

    shapes: Shapes = {}
    for path in weight_files(found):
        try:
            with safe_open(path, "np") as file:
                names = file.keys()
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
        except OSError as error:
            raise refuse(found.typed, f"its {path.name} cannot be read: {error}") from error
        except SafetensorError as error:
            with open(path, "rb") as opened:
                is_pointer = opened.read(7) == b"version"
            if is_pointer:
                why = f"its {path.name} is a Git LFS pointer, not the weights"
                fix = Fix(remark="git lfs pull   (in its folder)")
                raise refuse(found.typed, why, fix) from error
            size = path.stat().st_size
            why = f"its {path.name} ({size} bytes) is no safetensors file, or was not copied whole"
            raise refuse(found.typed, f"{why}: {error}") from error
    return shapes


def same_numbers(found: Located, one: str, other: str) -> bool:
    """Whether two tensors of a checkpoint hold the same bytes.

    Format: eight bytes with the header's length, the header as JSON, the numbers.
    Source: https://huggingface.co/docs/safetensors/index#format
    """
    tensors = {}
    for path in weight_files(found):
        with open(path, "rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(bytes(content[8:start]))
        for name in {one, other} & header.keys():
            low, high = header[name]["data_offsets"]
            tensors[name] = header[name]["dtype"], content[start + low : start + high]
    return tensors[one] == tensors[other]


def compare(family: str, sizes: Sizes, shapes: Shapes, typed: str) -> None:
    """Refuse a config.json that is not of these tensors.

    Raises:
        ConfigError: the first size on which they disagree.
    """
    if not FAMILIES[family].is_known:
        return
    # What transformers refuses, or fails at, when it builds the model.
    heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
    groups = sizes.get("num_key_value_heads") or heads
    if width % heads and "gated" not in sizes:  # T5 alone has heads of any width
        why = f"its config.json has num_attention_heads = {heads}, no divisor of hidden_size"
        raise refuse(typed, f"{why} = {width}")
    if heads % groups:
        why = f"its config.json has num_key_value_heads = {groups}, no divisor of"
        raise refuse(typed, f"{why} num_attention_heads = {heads}")
    difference = next(_differences(family, sizes, shapes), None) if shapes else None
    if difference:
        why = "its config.json says {} = {}, and its tensors {}".format(*difference)
        raise refuse(typed, why, Fix(remark="the config.json that was saved with these weights"))


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
        why = f"its {error.filename} cannot be read: {error.strerror}"
        raise refuse(found.typed, why) from error
