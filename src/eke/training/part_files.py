"""Training state in parts: one safetensors file per rank, read by any number of ranks.

A tensor in a file is a range of elements of a larger tensor (rows under FSDP2), given in the
header, or belongs only to the rank. Weights have their names in the model's `state_dict`, and
`NAME@KEY` is optimizer state.
"""

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES
from torch import Tensor

from eke.common.errors import RunError

_BLOCK = 16 << 20
"""Bytes that are checked and written at a time."""


@dataclass(frozen=True)
class Piece:
    """Elements of a tensor on one rank."""

    tensor: Tensor
    first: int = 0
    """Index of the first element in the full tensor."""
    shape: tuple[int, ...] | None = None
    """Shape of the full tensor. None if the tensor belongs only to this rank."""


@dataclass
class Held:
    """Part of a checkpoint that a rank writes."""

    pieces: dict[str, Piece]
    notes: dict[str, Any] = field(default_factory=dict)
    """JSON values, which may contain tensors."""
    rank: int = 0
    world_size: int = 1
    """Number of ranks that write: the ranks of one replica."""
    writes: bool = True


def part_name(rank: int, world_size: int) -> str:
    """Return the file name of a rank's part."""
    return f"part-{rank:05d}-of-{world_size:05d}.safetensors"


def why_incomplete(names: Iterable[str]) -> str:
    """Return which part is missing from or foreign to the names of a checkpoint, "" if none."""
    parts = {name for name in names if name.startswith("part-")}
    found = re.fullmatch(r"part-\d{5}-of-(\d{5})\.safetensors", max(parts, default=""))
    expected = {part_name(rank, int(found[1])) for rank in range(int(found[1]))} if found else set()
    odd = min(parts ^ expected, default="" if parts else "every part")
    return odd and (f"{odd} is of another checkpoint" if odd in parts else f"{odd} is missing")


def write_part(path: Path, held: Held, origin: str) -> tuple[int, int]:
    """Write and sync a new file, and return its size and CRC-32. `origin` names the checkpoint."""
    # Wide formats first, so that each tensor is aligned.
    pieces = sorted(held.pieces.items(), key=lambda item: (-item[1].tensor.itemsize, item[0]))
    formats = {dtype: name for name, dtype in _TYPES.items()}
    header: dict[str, Any] = {}
    end = 0
    for name, piece in pieces:
        start, end = end, end + piece.tensor.nbytes
        dtype, shape = formats[piece.tensor.dtype], list(piece.tensor.shape) or [1]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    places = {n: [p.first, *p.shape] for n, p in pieces if p.shape is not None}
    notes = {**held.notes, "origin": origin, "places": places}
    told = {key: json.dumps(value, default=Tensor.tolist) for key, value in notes.items()}
    text = json.dumps({**header, "__metadata__": told}).encode()
    text += b" " * (-len(text) % 8)
    checksum = zlib.crc32(begin := len(text).to_bytes(8, "little") + text)
    with open(path, "xb") as file:
        file.write(begin)
        for _, piece in pieces:
            flat = piece.tensor.detach().to("cpu").contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().data
            for at in range(0, len(data), _BLOCK):
                block = data[at : at + _BLOCK]
                checksum = zlib.crc32(block, checksum)
                file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return len(begin) + end, checksum


class SavedTensors:
    """Tensors by name, readable in ranges, and other optimizer state."""

    def __init__(self, values: Mapping[str, Any], groups: list[dict[str, Any]] | None) -> None:
        """Hold tensors, other values by `NAME@KEY`, and the optimizer's groups."""
        self.numbers = {n: value for n, value in values.items() if not isinstance(value, Tensor)}
        self.groups = groups
        self.tied: dict[str, str] = {}
        """Other names of a tensor -> name under which it was written."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._ranges: dict[str, list[tuple[int, Tensor]]] = {}
        """Index of the first element and flat elements of each range."""
        for name in values.keys() - self.numbers:
            self._add(name, values[name], 0, values[name].shape)

    def _add(self, name: str, tensor: Tensor, first: int, shape: Iterable[int]) -> None:
        self._shapes.setdefault(name, tuple(shape))
        self._ranges.setdefault(name, []).append((first, tensor.reshape(-1)))

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in alphabetical order, without other names of the same tensor."""
        return sorted(self._shapes)

    def keys(self) -> dict[str, list[str]]:
        """Return the keys of optimizer state by name of the weight."""
        found: dict[str, list[str]] = {}
        for name in (*self.names, *self.numbers):
            weight, of_state, key = name.rpartition("@")
            if of_state:
                found.setdefault(weight, []).append(key)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        return self._shapes[self._known(name)]

    def dtype(self, name: str) -> torch.dtype:
        """Return the format in which the tensor was written."""
        return self._ranges[self._known(name)][0][1].dtype

    def read(self, name: str) -> Tensor:
        """Return a full tensor, which may be a mapped file and must not be changed."""
        shape = self.shape(name)
        return self.read_flat(name, 0, prod(shape)).reshape(shape)

    def read_flat(self, name: str, first: int, last: int) -> Tensor:
        """Return elements `first` to `last` (exclusive) of a tensor, which must not be changed."""
        ranges = self._ranges[self._known(name)]
        found = [
            numbers[max(first, start) - start : last - start]
            for start, numbers in ranges
            if start < last and first < start + len(numbers)
        ]
        return found[0] if len(found) == 1 else torch.cat([ranges[0][1][:0], *found])

    def _known(self, name: str) -> str:
        weight, of_state, key = name.partition("@")
        name = f"{self.tied.get(weight, weight)}{of_state}{key}"
        if name not in self._shapes:
            raise RunError(f"the checkpoint has no tensor {name}")
        return name


class PartFiles(SavedTensors):
    """All parts of a checkpoint as one, in mapped files. RunError: Parts or ranges are missing."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        if why := why_incomplete(path.name for path in folder.glob("part-*")):
            raise RunError(f"{folder}: {why}")
        self._files: list[Any] = []
        for path in sorted(folder.glob("part-*.safetensors")):
            try:
                self._files.append(safe_open(path, "pt"))
            except SafetensorError as error:
                raise RunError(f"{path}: is damaged ({error})") from None
            if self.note("origin", len(self._files) - 1) != self.note("origin"):
                raise RunError(f"{path}: is of another checkpoint")
        self.world_size = len(self._files)
        """Number of ranks that wrote the checkpoint."""
        super().__init__({}, self.note("groups"))
        self.tied = self.note("tied") or {}
        for rank, file in enumerate(self._files):
            self.numbers |= self.note("numbers", rank) or {}
            for name, (first, *shape) in self.note("places", rank).items():
                self._add(name, file.get_tensor(name), first, shape)
        for name, ranges in self._ranges.items():
            ranges.sort(key=lambda each: (each[0], len(each[1])))
            ends = [0, *(first + len(numbers) for first, numbers in ranges)]
            if [*(first for first, _ in ranges), prod(self._shapes[name])] != ends:
                raise RunError(f"{folder}: the parts of {name} have gaps or overlap")

    def note(self, key: str, rank: int = 0) -> Any:
        """Return a JSON value that this rank wrote, None if it did not."""
        return json.loads(self._files[rank].metadata().get(key, "null"))

    def own(self, rank: int) -> dict[str, Tensor]:
        """Return the tensors of a writing rank that other ranks cannot use."""
        names = self._files[rank].keys() - self.note("places", rank).keys()
        return {name: self._files[rank].get_tensor(name) for name in sorted(names)}
